"""Schedulers under scaling and warm-up, and the legal results of configure_optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as sched
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.optim.swa_utils import SWALR

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.errors import CheckpointError, TaskError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig, read_optimizers
from trainkit.optim.optimizer_state import load_state, state_of
from trainkit.optim.schedule import LearningRates

MAKERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: sched.StepLR(o, 2, 0.5),
    "multistep": lambda o: sched.MultiStepLR(o, [2, 4], 0.5),
    "exponential": lambda o: sched.ExponentialLR(o, 0.9),
    "lambda": lambda o: sched.LambdaLR(o, lambda t: 1 / (1 + t)),
    "multiplicative": lambda o: sched.MultiplicativeLR(o, lambda t: 0.9),
    "constant": lambda o: sched.ConstantLR(o, 0.5, 3),
    "linear": lambda o: sched.LinearLR(o, 0.1, 1.0, 4),
    "polynomial": lambda o: sched.PolynomialLR(o, 5, 2.0),
    "cosine": lambda o: sched.CosineAnnealingLR(o, 5, eta_min=0.01),
    "restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 3, eta_min=0.01),
    "cyclic": lambda o: sched.CyclicLR(o, 0.01, 0.3, 3, cycle_momentum=False),
    "onecycle": lambda o: sched.OneCycleLR(o, 0.3, total_steps=8, cycle_momentum=False),
    "swa": lambda o: SWALR(o, 0.02, anneal_epochs=4),
    "sequential": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.1, 1.0, 2), sched.CosineAnnealingLR(o, 4, eta_min=0.01)], [2]
    ),
    "chained": lambda o: sched.ChainedScheduler(
        [sched.LambdaLR(o, lambda t: 1.0), sched.ExponentialLR(o, 0.9)]
    ),
}


def sgd() -> SGD:
    """Return an optimizer with two groups of different rates."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    return SGD(groups, lr=1.0, momentum=0.9)


def contract(factor: int, warmup_steps: int = 0) -> BatchPlan:
    """Return a contract that scales the rates by `factor`."""
    return BatchPlan(1, factor, 1, "linear", None, warmup_steps)


def plain_rates(make: Callable[[Optimizer], Any], steps: int) -> list[list[float]]:
    """Return the groups' rates of each step as set by torch alone."""
    optimizer = sgd()
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def run(optimizer: Optimizer, rates: LearningRates, start: int, steps: int) -> list[list[float]]:
    """Return the rates that the optimizer sees in the steps from `start` on."""
    seen = []
    for step in range(start, start + steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        rates.after_step(step + 1)
    return seen


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("factor", "warmup_steps"), [(1, 0), (4, 0), (4, 3)])
def test_rate_is_factor_times_schedule_times_warmup(
    name: str, factor: int, warmup_steps: int
) -> None:
    """For each scheduler of torch, the optimizer's rate is
    factor x the scheduler's rate x warm-up.
    """
    optimizer, agreed = sgd(), contract(factor, warmup_steps)
    schedule = ScheduleConfig(MAKERS[name](optimizer), interval="step")
    seen = run(optimizer, LearningRates([optimizer], [schedule], agreed), 0, 7)
    alone = plain_rates(MAKERS[name], 7)
    for step, (ours, torchs) in enumerate(zip(seen, alone, strict=True)):
        assert ours == pytest.approx(
            [factor * agreed.warmup(step) * lr for lr in torchs], rel=1e-12
        )


@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_resumes_where_it_was(name: str) -> None:
    """State taken after three steps and loaded into new objects gives
    the rates of the run that never stopped.
    """
    first, second, whole = sgd(), sgd(), sgd()
    rates = [
        LearningRates([o], [ScheduleConfig(MAKERS[name](o), "step")], contract(4, 5))
        for o in (first, second, whole)
    ]
    expected = run(whole, rates[2], 0, 7)
    assert run(first, rates[0], 0, 3) == expected[:3]
    second.load_state_dict(first.state_dict())
    rates[1].load_state_dict(rates[0].state_dict(), 3)
    assert run(second, rates[1], 3, 4) == [pytest.approx(lrs, rel=1e-12) for lrs in expected[3:]]


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_schedule_holds_plain_values_alone(name: str, tmp_path: Any) -> None:
    """The saved state of a schedule can be read without running code."""
    optimizer = sgd()
    rates = LearningRates(
        [optimizer], [ScheduleConfig(MAKERS[name](optimizer), "step")], contract(2)
    )
    torch.save(rates.state_dict(), tmp_path / "rates")
    assert torch.load(tmp_path / "rates", weights_only=True)["factor"] == 2


@pytest.mark.parametrize("name", MAKERS)
def test_another_factor_scales_what_is_left(name: str) -> None:
    """A schedule that resumes at another number of ranks has the
    rates of that number from there on.
    """
    before, after, whole = sgd(), sgd(), sgd()
    old, new, other = (
        LearningRates([o], [ScheduleConfig(MAKERS[name](o), "step")], contract(factor))
        for o, factor in ((before, 4), (after, 2), (whole, 2))
    )
    run(before, old, 0, 3)
    after.load_state_dict(before.state_dict())
    new.load_state_dict(old.state_dict(), 3)
    expected = run(whole, other, 0, 7)[3:]
    assert run(after, new, 3, 4) == [pytest.approx(lrs, rel=1e-9) for lrs in expected]


def test_epoch_schedules_move_at_epochs() -> None:
    """A scheduler of interval "epoch" moves once an epoch, each `frequency` epochs."""
    optimizer = sgd()
    schedule = ScheduleConfig(sched.ExponentialLR(optimizer, 0.5), "epoch", frequency=2)
    rates = LearningRates([optimizer], [schedule], contract(1))
    seen = []
    for epoch in range(4):
        optimizer.step()
        rates.after_step(epoch + 1)
        rates.after_epoch(epoch + 1, epoch + 1, {})
        seen.append(rates.current()[0])
    assert seen == pytest.approx([0.1, 0.05, 0.05, 0.025])


def test_step_schedules_keep_their_frequency() -> None:
    """A scheduler of interval "step" moves each `frequency` steps, and not at epochs."""
    optimizer = sgd()
    rates = LearningRates(
        [optimizer], [ScheduleConfig(sched.ExponentialLR(optimizer, 0.5), "step", 3)], contract(1)
    )
    assert [lrs[0] for lrs in run(optimizer, rates, 0, 5)] == pytest.approx(
        [0.1, 0.1, 0.1, 0.05, 0.05]
    )
    rates.after_epoch(1, 5, {})
    assert rates.current()[0] == pytest.approx(0.05)


def test_plateau_sees_the_scheduled_rate_under_warmup() -> None:
    """ReduceLROnPlateau cuts the scheduled rate, not the one that warm-up has lowered;
    its minimum is scaled too.
    """
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = sched.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.02)
    rates = LearningRates(
        [optimizer], [ScheduleConfig(plateau, monitor="loss")], contract(4, warmup_steps=4)
    )
    for epoch, loss in enumerate([1.0, 2.0]):
        rates.after_epoch(epoch + 1, epoch + 1, {"loss": loss})
    assert rates.current() == pytest.approx([0.08 * contract(4, 4).warmup(2)])
    rates.apply(4)
    assert rates.current() == pytest.approx([0.08])


def test_plateau_without_its_value() -> None:
    """A monitored value that was not logged is an error with those that were;
    strict=False waits for it.
    """
    optimizer = sgd()
    plateau = sched.ReduceLROnPlateau(optimizer)
    strict = LearningRates([optimizer], [ScheduleConfig(plateau, monitor="loss")], contract(1))
    with pytest.raises(
        TaskError, match=r"monitors 'loss', which was not logged for an epoch; there are a, b\."
    ):
        strict.after_epoch(1, 1, {"b": 1.0, "a": 1.0})
    LearningRates(
        [optimizer], [ScheduleConfig(plateau, monitor="loss", strict=False)], contract(1)
    ).after_epoch(1, 1, {})


def test_other_schedules_do_not_fit() -> None:
    """State of another number of schedulers is refused."""
    optimizer = sgd()
    with_one = LearningRates([optimizer], [ScheduleConfig(sched.StepLR(optimizer, 1))], contract(1))
    with pytest.raises(CheckpointError, match=r"1 learning-rate scheduler.* this task 0"):
        LearningRates([optimizer], [], contract(1)).load_state_dict(with_one.state_dict(), 0)


def test_rates_reach_all_optimizers() -> None:
    """Every group of every optimizer is scaled."""
    first, second = sgd(), sgd()
    assert LearningRates([first, second], [], contract(2)).current() == [0.2, 0.04, 0.2, 0.04]
    assert second.param_groups[1]["lr"] == 0.04


ONE = sgd()
STEP = sched.StepLR(ONE, 1)
PLATEAU = sched.ReduceLROnPlateau(ONE)


class GreedyLR:
    """A scheduler of a package, of a class of its own: transformers', timm's."""

    def step(self, metric: float) -> None:
        """Move by a value."""


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedules"),
    [
        (ONE, [ONE], []),
        ([ONE], [ONE], []),
        ((ONE, ONE), [ONE, ONE], []),
        (([ONE], [STEP]), [ONE], [ScheduleConfig(STEP)]),
        (([ONE], []), [ONE], []),
        (([ONE], STEP), [ONE], [ScheduleConfig(STEP)]),
        ([[ONE], {"scheduler": STEP, "interval": "step"}], [ONE], [ScheduleConfig(STEP, "step")]),
        (([ONE], [{"scheduler": STEP, "interval": "step"}]), [ONE], [ScheduleConfig(STEP, "step")]),
        ({"optimizer": ONE}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": None}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": STEP}, [ONE], [ScheduleConfig(STEP)]),
        (
            {
                "optimizer": ONE,
                "lr_scheduler": {"scheduler": PLATEAU, "monitor": "a", "reduce_on_plateau": True},
            },
            [ONE],
            [ScheduleConfig(PLATEAU, monitor="a", reduce_on_plateau=True)],
        ),
        (
            {
                "optimizer": ONE,
                "lr_scheduler": {"scheduler": STEP, "monitor": "a", "reduce_on_plateau": True},
            },
            [ONE],
            [ScheduleConfig(STEP, monitor="a", reduce_on_plateau=True)],
        ),
        (
            [{"optimizer": ONE, "lr_scheduler": STEP}, {"optimizer": ONE}],
            [ONE, ONE],
            [ScheduleConfig(STEP)],
        ),
    ],
)
def test_all_forms_of_lightning_are_read(
    returned: Any, optimizers: list[Any], schedules: list[Any]
) -> None:
    """Each form that Lightning takes from configure_optimizers is taken here."""
    assert read_optimizers(returned) == (optimizers, schedules)


def test_by_hand_a_value_is_that_of_the_task() -> None:
    """reduce_on_plateau is without effect there, as in Lightning."""
    given = {"scheduler": STEP, "monitor": "a", "reduce_on_plateau": True}
    made = read_optimizers({"optimizer": ONE, "lr_scheduler": given}, automatic=False)
    assert made == ([ONE], [ScheduleConfig(STEP)])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None: nothing would be trained"),
        ([], "returned list"),
        ([ONE, STEP], "returned list"),
        ((ONE, STEP), "returned tuple"),
        (([ONE], 3), "lr_scheduler is of type int; it must be a torch scheduler"),
        (([STEP], STEP), "returned tuple"),
        ({"optim": ONE}, r"dict with the keys \['optim'\]; it must have 'optimizer'"),
        ({"optimizer": ONE, "monitor": "a"}, r"keys \['monitor', 'optimizer'\]"),
        ({"optimizer": STEP}, r"it must have 'optimizer' \(a torch optimizer\)"),
        (
            {"optimizer": ONE, "lr_scheduler": 3},
            "lr_scheduler is of type int; it must be a torch scheduler",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": GreedyLR()},
            r"GreedyLR; it must be .* must define lr_scheduler_step\(.* on_train_epoch_end.* a Loop",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"sched": STEP}},
            r"keys \['sched'\]; it must have 'scheduler'",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": STEP, "interval": "batch"}},
            "'batch'; it must be 'epoch' or",
        ),
        (
            {"optimizer": ONE, "lr_scheduler": {"scheduler": STEP, "frequency": 0}},
            "frequency is 0; it must be",
        ),
        ({"optimizer": ONE, "lr_scheduler": PLATEAU}, "ReduceLROnPlateau needs 'monitor'"),
        (
            {
                "optimizer": ONE,
                "lr_scheduler": {"scheduler": PLATEAU, "monitor": "a", "interval": "step"},
            },
            "ReduceLROnPlateau has interval 'step'; it must be 'epoch'",
        ),
    ],
)
def test_other_forms_are_refused(returned: Any, words: str) -> None:
    """Another form is refused; the error names the legal ones."""
    with pytest.raises(TaskError, match=words):
        read_optimizers(returned)


def test_rates_can_be_held() -> None:
    """Held rates are scaled and warmed up, the schedulers let go of them,
    and a restart remembers.
    """
    optimizer = sgd()
    rates = LearningRates(
        [optimizer], [ScheduleConfig(sched.StepLR(optimizer, 1, 0.5), "step")], contract(2, 4)
    )
    optimizer.step()
    rates.after_step(1)
    assert rates.unscaled() == pytest.approx([0.05, 0.01])
    rates.hold([0.3, 0.4], 1)
    assert rates.current() == pytest.approx(
        [0.6 * contract(2, 4).warmup(1), 0.8 * contract(2, 4).warmup(1)]
    )
    rates.after_step(9)
    assert rates.current() == pytest.approx([0.6, 0.8])
    other = sgd()
    again = LearningRates(
        [other], [ScheduleConfig(sched.StepLR(other, 1, 0.5), "step")], contract(2)
    )
    again.load_state_dict(rates.state_dict(), 9)
    other.step()
    again.after_step(10)
    assert again.current() == pytest.approx([0.6, 0.8])


def test_a_group_can_have_a_share_of_its_rate() -> None:
    """A share stays while the schedulers move on, until it is set again;
    schedulers do not see it.
    """
    optimizer = sgd()
    rates = LearningRates(
        [optimizer], [ScheduleConfig(sched.StepLR(optimizer, 1, 0.5), "step")], contract(1)
    )
    rates.set_shares({1: 0.25}, 0)
    assert rates.current() == pytest.approx([0.1, 0.005])
    optimizer.step()
    rates.after_step(1)
    assert rates.current() == pytest.approx([0.05, 0.0025])
    rates.set_shares({}, 1)
    assert rates.current() == pytest.approx([0.05, 0.01])


@pytest.mark.parametrize(("every", "rate"), [(1, 0.5**5), (2, 0.5**2)])
def test_plateau_waits_for_the_validations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, rate: float
) -> None:
    """ReduceLROnPlateau with check_val_every_n_epoch=2 moves
    with each validation and not between; a line says so.
    """

    class Plateau(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "const"},
            }

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("const", 1.0)

    trainer = quiet(tmp_path, max_epochs=6, check_val_every_n_epoch=every)
    trainer.fit(Plateau(), loader(8), loader(8))
    # the first validation sets the mark, the others do not improve
    assert trainer.run.rates.current() == [rate]
    line = "so patience=0 counts validations, each of 2 epochs (check_val_every_n_epoch=2)"
    assert " ".join(capsys.readouterr().out.split()).count(line) == (every > 1)


class Ramp:
    """A rate that holds more than plain values, which a checkpoint leaves to the task."""

    def __init__(self) -> None:
        self.steps = torch.tensor(5.0)

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / float(self.steps))


class Sequence(Line):
    """Warm-up by an object, then a cosine."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        parts = [LambdaLR(optimizer, Ramp()), CosineAnnealingLR(optimizer, 12)]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": SequentialLR(optimizer, parts, [5]), "interval": "step"},
        }


@pytest.mark.parametrize("stop", [3, 9])
def test_schedulers_within_schedulers_resume(tmp_path: Path, stop: int) -> None:
    """What cannot be stored of one of them takes nothing else with it."""
    whole, rest = Sequence(), Sequence()
    quiet(tmp_path / "whole", max_steps=17).fit(whole, loader(23))
    quiet(tmp_path / "parts", max_steps=stop, enable_checkpointing=True).fit(Sequence(), loader(23))
    quiet(tmp_path / "parts", max_steps=17, enable_checkpointing=True).fit(
        rest, loader(23), ckpt_path="last"
    )
    assert torch.equal(weights(rest), weights(whole))


class Absolute(sched.LRScheduler):
    """A schedule that does not ask for the optimizer's rate."""

    def get_lr(self) -> list[float]:
        """Return the next rates."""
        return [0.05 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


class Renamed(sched.CosineAnnealingLR):
    """A schedule of torch's by another name."""


@pytest.mark.parametrize(
    ("kind", "factor", "count"),
    [(Absolute, 2, 1), (Absolute, 1, 0), (partial(Renamed, T_max=5), 2, 0)],
)
def test_a_schedule_with_rates_of_its_own_is_named(kind: Any, factor: int, count: int) -> None:
    """lr_scaling cannot know them: without a line the first step alone would be scaled."""
    optimizer, said = sgd(), list[str]()
    schedules = [ScheduleConfig(kind(optimizer), "step")]
    LearningRates([optimizer], schedules, contract(factor), say=said.append)
    assert [line.startswith("Absolute computes rates itself: ") for line in said] == [True] * count


@pytest.mark.parametrize("name", MAKERS)
def test_a_rate_in_a_tensor_stays_there(name: str) -> None:
    """It is written into the tensor, as by torch's schedulers: compiled steps read it there."""

    def make() -> tuple[SGD, Any, list[Any]]:
        tensors = [torch.tensor(lr) for lr in (0.1, 0.02)]
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in tensors]
        optimizer = SGD(groups, lr=1.0)
        return optimizer, MAKERS[name](optimizer), tensors

    (plain, of_torch, _), (optimizer, scheduler, tensors) = make(), make()
    rates = LearningRates([optimizer], [ScheduleConfig(scheduler, "step")], contract(1))
    for step in range(7):
        assert [group["lr"] for group in optimizer.param_groups] == [
            float(group["lr"]) for group in plain.param_groups
        ]
        assert all(g["lr"] is t for g, t in zip(optimizer.param_groups, tensors, strict=True))
        plain.step(), optimizer.step()
        of_torch.step(), rates.after_step(step + 1)


@pytest.mark.parametrize("in_tensor", [False, True])
def test_a_lambda_resumes_to_the_bit(in_tensor: bool, tmp_path: Path) -> None:
    """A rate in a tensor is multiplied in its precision, as torch does; and a factor computed by
    numpy is saved as the plain number that it is.
    """

    def make() -> tuple[SGD, LearningRates]:
        groups = [
            {"params": [nn.Parameter(torch.zeros(1))], "lr": torch.tensor(lr) if in_tensor else lr}
            for lr in (0.01, 0.02)
        ]
        optimizer = SGD(groups, lr=1.0)
        scheduler = LambdaLR(optimizer, [lambda t: 1 / (1 + t), lambda t: np.exp(-0.1 * t)])
        return optimizer, LearningRates(
            [optimizer], [ScheduleConfig(scheduler, "step")], contract(1)
        )

    def resumed(step: int) -> list[float]:
        optimizer, rates = make()
        for number in range(step):
            optimizer.step(), rates.after_step(number + 1)
        new, others = make()
        new.load_state_dict(optimizer.state_dict())
        torch.save(rates.state_dict(), tmp_path / "rates")
        others.load_state_dict(torch.load(tmp_path / "rates", weights_only=True), step)
        torch.save(others.state_dict(), tmp_path / "rates")
        assert torch.load(tmp_path / "rates", weights_only=True)["factor"] == 1
        assert others.current() == rates.current()
        return others.current()

    assert len({tuple(resumed(step)) for step in range(6)}) == 6


def test_a_rate_that_groups_share_in_a_tensor_can_be_set() -> None:
    """What the user writes into it holds from then on; else it is scaled and warmed up."""
    shared, said = torch.tensor(0.1), list[str]()
    optimizer = SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=shared)
    rates = LearningRates([optimizer], [], contract(3, warmup_steps=4), say=said.append)
    seen = [float(shared)]
    for step in range(4):
        rates.record_update()
        if step == 2:
            shared.fill_(0.7)
        rates.after_step(step + 1)
        seen.append(float(shared))
    assert seen == pytest.approx([0.15, 0.2, 0.25, 0.7, 0.7])
    assert len(said) == 1 and "group 0 was set to 0.7 by your own code" in said[0]
    assert all(group["lr"] is shared for group in optimizer.param_groups)


def test_a_rate_in_a_tensor_that_a_loaded_state_wrote_again_is_not_the_users() -> None:
    """Rank 0 sends its optimizers' states to the others after the rates are set: 0.15 of float32 is
    not Python's.
    """
    optimizer, said = SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1)), list[str]()
    rates = LearningRates([optimizer], [], contract(3, warmup_steps=4), say=said.append)
    seen = []
    for step in range(4):
        load_state(optimizer, state_of(optimizer))
        seen += rates.current()
        rates.after_step(step + 1)
    assert seen == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert said == []


def test_a_group_added_to_one_optimizer_leaves_the_rates_of_the_next() -> None:
    """Those in tensors, and those that the user has set: they have other places from then on."""
    optimizers = [
        SGD([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (0.1, torch.tensor(0.1), 0.1)
    ]
    rates = LearningRates(optimizers, [], contract(3, warmup_steps=4))
    optimizers[2].param_groups[0]["lr"] = 0.7
    rates.after_step(1)
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.05})
    rates.after_step(2)
    assert rates.current() == pytest.approx([0.25, 0.05 * 0.25 / 0.3, 0.25, 0.7])


def test_a_group_added_at_the_optimizers_own_rate_in_a_tensor_leaves_that_of_the_first() -> None:
    """torch gives it the same tensor, which has the first group's rate in warm-up."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    rates = LearningRates([optimizer], [], contract(3, warmup_steps=4))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    rates.after_step(1)
    written = [float(group["lr"]) for group in optimizer.param_groups]
    assert written == pytest.approx([0.2, 0.15 * 0.2 / 0.3])


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_rate_in_a_tensor_with_a_gradient_can_be_scaled() -> None:
    """Tasks that learn their rates have one."""
    rate = torch.tensor(0.1, requires_grad=True)
    LearningRates([SGD([nn.Parameter(torch.zeros(1))], lr=rate)], [], contract(3))
    assert rate.item() == pytest.approx(0.3) and rate.requires_grad


def test_a_rate_stays_a_number_if_the_saved_one_is_a_tensor() -> None:
    """torch's optimizers take no tensor with foreach=True."""
    weight = nn.Parameter(torch.zeros(1))
    saved = state_of(torch.optim.Adam([weight], lr=torch.tensor(0.5)))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    load_state(optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_rate_set_by_hand_holds_when_the_factor_changes(warmup_steps: int) -> None:
    """By another accumulation, or on other ranks: no factor reaches it, as the line says. Other
    groups, and what schedulers start from, are scaled.
    """
    first, second = sgd(), sgd()
    plan = replace(contract(2, warmup_steps), lr_reference_batch_size=1, later=((1, 2),))
    rates = LearningRates([first], [], plan)
    first.param_groups[0]["lr"] = 0.05
    run(first, rates, 0, 4)
    rates.start_epoch(1, 4)
    assert rates.current() == pytest.approx([0.05, 4 * 0.02])
    again = LearningRates([second], [], replace(plan, world_size=4))
    again.start_epoch(1, 0)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(rates.state_dict(), 4)
    assert again.current() == pytest.approx([0.05, 8 * 0.02])


def test_a_rate_set_by_hand_follows_the_optimizers_own() -> None:
    """A user that resumes with twice the rate has twice the one that was set."""
    first, second = sgd(), sgd()
    rates = LearningRates([first], [], contract(2))
    first.param_groups[0]["lr"] = 0.05
    run(first, rates, 0, 1)
    second.param_groups[0]["lr"] *= 2
    again = LearningRates([second], [], contract(2))
    second.load_state_dict(first.state_dict())
    again.load_state_dict(rates.state_dict(), 1)
    assert again.current() == pytest.approx([0.1, 2 * 0.02])


def _restarted(optimizer: Optimizer) -> SequentialLR:
    parts = [sched.StepLR(optimizer, 2, 0.5), sched.StepLR(optimizer, 2, 0.5)]
    return SequentialLR(optimizer, parts, [1])


def _halved_after(optimizer: Optimizer) -> sched.ChainedScheduler:
    parts = [LambdaLR(optimizer, lambda t: 0.9**t), sched.StepLR(optimizer, 1, 0.5)]
    return sched.ChainedScheduler(parts)


ABSOLUTE = {name: MAKERS[name] for name in ("lambda", "restarts", "cyclic", "onecycle", "chained")}
ABSOLUTE |= {"milestone": _restarted, "halved": _halved_after}


def by_epochs(
    make: Callable[[Optimizer], Any], ranks: int, warmup_steps: int = 0
) -> tuple[SGD, LearningRates]:
    """Return an optimizer and its rates by epochs of 1 step; the accumulation doubles at epoch 2."""
    optimizer = sgd()
    plan = replace(contract(ranks, warmup_steps), lr_reference_batch_size=1, later=((2, 2),))
    return optimizer, LearningRates([optimizer], [ScheduleConfig(make(optimizer), "epoch")], plan)


def epochs(optimizer: SGD, rates: LearningRates, start: int, end: int, lr: float = 0.0) -> None:
    """Train epochs, and begin one more; a rate is set by hand in the first one."""
    for epoch in range(start, end):
        rates.start_epoch(epoch, epoch)
        if lr and epoch == start:
            optimizer.param_groups[0]["lr"] = lr
        run(optimizer, rates, epoch, 1)
        rates.after_epoch(epoch + 1, epoch + 1, {})
    rates.start_epoch(end, end)


@pytest.mark.parametrize("name", ABSOLUTE)
def test_a_rate_that_a_scheduler_has_overwritten_is_not_set_by_hand(name: str) -> None:
    """Warm-up, another accumulation, and other ranks scale it, as if none had been set."""
    plain, by_hand, resumed, halved = (
        by_epochs(ABSOLUTE[name], ranks, warmup_steps=4) for ranks in (4, 4, 2, 2)
    )
    epochs(*plain, 0, 1)
    epochs(*by_hand, 0, 1, lr=0.05)
    assert by_hand[1].current() == pytest.approx(plain[1].current())
    resumed[0].load_state_dict(by_hand[0].state_dict())
    resumed[1].load_state_dict(by_hand[1].state_dict(), 1)
    epochs(*halved, 0, 1)
    assert resumed[1].current() == pytest.approx(halved[1].current())
    epochs(*plain, 1, 2)
    epochs(*by_hand, 1, 2)
    assert by_hand[1].current() == pytest.approx(plain[1].current())


def test_a_rate_set_by_hand_holds_under_a_scheduler_that_multiplies_it() -> None:
    """StepLR halves what was set; no factor reaches it."""
    first, second = by_epochs(MAKERS["step"], 4), by_epochs(MAKERS["step"], 2)
    epochs(*first, 0, 2, lr=0.05)
    assert first[1].current() == pytest.approx([0.025, 0.5 * 8 * 0.02])
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict(), 2)
    second[1].start_epoch(2, 2)
    assert second[1].current() == pytest.approx([0.025, 0.5 * 4 * 0.02])


def test_the_line_about_a_rate_set_by_hand_comes_once() -> None:
    """Though a scheduler writes another after each."""
    optimizer, said = sgd(), list[str]()
    schedule = ScheduleConfig(MAKERS["lambda"](optimizer), "step")
    rates = LearningRates([optimizer], [schedule], contract(4), say=said.append)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.05
        run(optimizer, rates, step, 1)
    assert len(said) == 1
