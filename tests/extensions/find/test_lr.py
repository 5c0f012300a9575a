"""find_lr: exact losses at rising rates, and nothing of the user's is changed, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

import trainkit
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, Numbered, Numbers, Recorder, loader, quiet, weights
from trainkit.api.datamodule import DataModule
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.find.lr import find_lr
from trainkit.trainer import Trainer


class Seen(Net):
    """Dropout and batch norm; notes its batches and rates, and keeps its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[list[int]] = []
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train."""
        self.came.append(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)

    def configure_optimizers(self) -> Any:
        """Return the optimizer that it keeps."""
        return self.optimizer


def state_of(task: nn.Module, optimizer: Any, generators: list[torch.Generator]) -> list[Any]:
    """Return all that may not change, as plain values and tensors."""
    state = optimizer.state_dict()
    numbers = np.random.get_state()
    held = [
        *task.state_dict().values(),
        torch.get_rng_state(),
        *(g.get_state() for g in generators),
        torch.tensor(numbers[1]),
    ]
    return [
        held,
        state["param_groups"],
        len(state["state"]),
        random.getstate(),
        numbers[2:],
        task.training,
    ]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether they are equal, bit for bit."""
    tensors = all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    return tensors and len(before[0]) == len(after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("own_sampler", [False, True])
def test_nothing_of_the_users_changes(own_sampler: bool, tmp_path: Path) -> None:
    """Weights, buffers, the optimizer, all random numbers, the loader's and the sampler's
    generators; a fit afterwards sees the same batches, and ends with the same weights, as one
    without the finder."""

    def made() -> tuple[Seen, DataLoader[Any], list[torch.Generator]]:
        torch.manual_seed(5)
        generators = [torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)]
        data = Numbered(40)
        order: dict[str, Any] = {"shuffle": True}
        if own_sampler:
            order = {"sampler": RandomSampler(data, replacement=True, generator=generators[1])}
        return (
            Seen(),
            DataLoader(data, 8, generator=generators[0], num_workers=1, **order),
            generators,
        )

    task, data, generators = made()
    quiet(tmp_path / "a", max_epochs=2).fit(task, data)
    found, data, generators = made()
    before = state_of(found, found.optimizer, generators)
    curve = find_lr(
        found, data, trainer=quiet(tmp_path / "b", max_epochs=2), num_training=12, min_lr=1e-4
    )
    assert same(before, state_of(found, found.optimizer, generators))
    assert len(curve.lrs) == 12 and found.came == []
    assert not (tmp_path / "b").exists(), "no run's folder"
    quiet(tmp_path / "c", max_epochs=2).fit(found, data)
    assert found.came == task.came and torch.equal(weights(found), weights(task))


def test_a_task_that_was_fitted_before_can_be_searched(tmp_path: Path) -> None:
    """Its weights go in, and stay."""
    task = Line()
    quiet(tmp_path, max_epochs=1).fit(task, loader())
    before = weights(task)
    curve = find_lr(task, loader(), num_training=10, min_lr=1e-6, max_lr=1e-5)
    assert torch.equal(before, weights(task)) and curve.losses[0] < 3


def test_losses_are_those_of_plain_steps_at_these_rates() -> None:
    """A loop by hand at the same rates has the same losses, two groups scaled by one factor."""

    class Two(Line):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": [self.model.weight], "lr": 0.01},
                {"params": [self.model.bias], "lr": 0.1},
            ]
            return torch.optim.SGD(groups)

    curve = find_lr(
        Two(), loader(32, 8), num_training=10, min_lr=1e-3, max_lr=1e-1, early_stop_threshold=None
    )
    model = Two().model
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    batches = list(loader(32, 8)) * 3
    for lr, loss, (x, y) in zip(curve.lrs, curve.losses, batches, strict=False):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr / 10, lr
        now = functional.mse_loss(model(x), y)
        assert loss == pytest.approx(float(now.detach()), rel=1e-5)
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
    assert len(curve.lrs) == 10 and curve.stopped == ""


class Weighed(Numbers):
    """Weighs its samples by their numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the weighted mean."""
        x, y, number = batch
        return ((self(x) - y).pow(2).mean(1) * (number + 1)).sum() / (number + 1).sum()

    def batch_weight(self, batch: Any) -> Any:
        """Return a weight that no count of samples gives."""
        return (batch[2] + 1).sum()


@pytest.mark.parametrize("kind", [Numbers, Weighed])
def test_two_ranks_measure_the_same_curve_as_one(kind: type[Line], tmp_path: Path) -> None:
    """The exact mean over all samples of a step, the Task's own weights included,
    uneven last steps too.
    """
    options: dict[str, Any] = {"precision": "64-true", "global_batch_size": 8, "lr_scaling": "none"}

    def work(engine: Any, batch_size: int) -> Any:
        data = DataLoader(Numbered(21), batch_size)
        trainer = quiet(tmp_path, engine=engine, max_epochs=1, **options)
        return find_lr(kind(), data, trainer=trainer, num_training=12, min_lr=1e-3, max_lr=0.1)

    def double(engine: ThreadEngine) -> Any:
        return work(engine, 4)

    alone = work("single", 8)
    for curve in World(2).run(double):
        assert curve.losses == pytest.approx(alone.losses, rel=1e-6) and curve.lrs == alone.lrs


def test_the_contracts_factor_is_applied_and_named(tmp_path: Path) -> None:
    """The rate of the optimizer is the user's times it, without warm-up and schedule."""
    rates: list[float] = []

    class Watched(Line):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer = quiet(tmp_path, max_epochs=1, lr_reference_batch_size=2, lr_warmup_steps=5)
    curve = find_lr(
        Watched(), loader(32, 8), trainer=trainer, num_training=10, min_lr=1e-5, max_lr=1e-3
    )
    assert curve.factor == 4 and rates == pytest.approx([4 * lr for lr in curve.lrs])


def test_a_divergence_ends_the_sweep(tmp_path: Path) -> None:
    """With the rate at which it did; losses that are not finite are left out."""
    curve = find_lr(Line(), loader(64, 8), num_training=40, min_lr=1e-4, max_lr=1e4)
    assert (
        "times its lowest" in curve.stopped
        and len(curve.lrs) < 40
        and curve.suggestion() is not None
    )
    wild = find_lr(
        Line(), loader(64, 8), num_training=40, min_lr=1e2, max_lr=1e30, early_stop_threshold=None
    )
    assert "not finite" in wild.stopped and all(np.isfinite(wild.losses))
    assert wild.results == {"lr": wild.lrs, "loss": wild.losses}


class Stream:
    """Batches without a length."""

    def __iter__(self) -> Any:
        yield from loader()


class ByHand(Line):
    """Updates its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Around(Line):
    """Makes its updates itself."""

    def optimizer_step(self, *arguments: Any) -> None:
        """Update."""
        super().optimizer_step(*arguments)


class Uncopyable(Line):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(3))


@pytest.mark.parametrize(
    ("task", "data", "arguments", "message"),
    [
        (Line, None, {}, "There is no training data"),
        (
            Line,
            Stream(),
            {},
            "The training data is a stream, which cannot be read and left as it was",
        ),
        (lambda: Line(lr=0.0), loader(), {}, "returned no learning rate above 0"),
        (ByHand, loader(), {}, "automatic_optimization is false"),
        (Around, loader(), {}, "Around.optimizer_step may set rates itself"),
        (Uncopyable, loader(), {}, "Uncopyable cannot be copied"),
        (
            Line,
            loader(),
            {"min_lr": 1.0, "max_lr": 0.1},
            "max_lr is 0.1, and min_lr is 1.0; the range must rise",
        ),
        (Line, loader(), {"min_lr": 0.0}, "min_lr is 0.0; it must be a rate above 0"),
        (Line, loader(), {"max_lr": float("inf")}, "max_lr is inf"),
        (Line, loader(), {"num_training": 5}, "num_training is 5; it must be 10 or more"),
        (
            Line,
            loader(),
            {"early_stop_threshold": 0.5},
            "early_stop_threshold is 0.5; it must be above 1",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused(
    task: Any, data: Any, arguments: dict[str, Any], message: str
) -> None:
    """With what is legal, or what to do."""
    made, before = task(), torch.get_rng_state()
    with pytest.raises((ConfigError, TaskError)) as error:
        find_lr(made, data, **arguments)
    assert message in str(error.value)
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_a_public_name_and_takes_a_datamodule(tmp_path: Path) -> None:
    """trainkit.find_lr; the trainer's own callbacks see nothing."""

    class Data(DataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    recorder = Recorder()
    trainer: Trainer = quiet(tmp_path, max_epochs=1, callbacks=recorder)
    curve = trainkit.find_lr(Line(), datamodule=Data(), trainer=trainer, num_training=10)
    assert len(curve.lrs) == 10 and recorder.lrs == []
    assert isinstance(weights(Line()), Tensor)
