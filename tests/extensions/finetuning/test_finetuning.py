"""Freezing and thawing: which parameters are trained when, batch norm,
the backbone's rates, and resuming.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as sched

from tests.helpers.threads import World
from tests.helpers.toy import Line, Recorder, fill, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.optim import decay_groups


class Parts(Line):
    """A backbone with batch norm, and a head."""

    def make_model(self) -> Any:
        """Create both; return the backbone's output size."""
        self.backbone = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        fill(self.backbone)
        fill(self.head)
        return nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        """Return the head's answer."""
        return self.head(self.model(self.backbone(x)))

    def configure_optimizers(self) -> Any:
        """Return SGD over groups of the backbone and of the head,
        with momentum and a rate that falls each step.
        """
        groups = decay_groups(self.backbone) + decay_groups(self.head)
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            }
        ]


class Watch(Callback):
    """Records which parts changed in each epoch, and the rates of its first step."""

    def __init__(self) -> None:
        self.changed: list[set[str]] = []
        self.rates: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        """Remember."""
        self.before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        """Compare."""
        now = task.state_dict()
        self.changed.append({n for n in now if not torch.equal(now[n], self.before[n])})


LINEAR = {"backbone.0.weight"}
NORM = {"backbone.1.weight", "backbone.1.bias"}
STATISTICS = {"backbone.1.running_mean", "backbone.1.running_var", "backbone.1.num_batches_tracked"}
HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("train_bn", "frozen"), [(True, LINEAR), (False, LINEAR | NORM | STATISTICS)]
)
def test_the_backbone_is_trained_from_its_epoch_on(
    tmp_path: Path, train_bn: bool, frozen: set[str]
) -> None:
    """Before its epoch the backbone keeps every bit, under momentum and weight decay;
    with train_bn its norms are trained.
    """
    watch = Watch()
    callbacks = [BackboneFinetuning(2, train_bn=train_bn), watch]
    quiet(tmp_path, max_epochs=4, callbacks=callbacks).fit(Parts(), loader(24), loader(4))
    everything = LINEAR | NORM | STATISTICS | HEAD
    assert watch.changed == [everything - frozen] * 2 + [everything] * 2


def test_a_frozen_backbone_is_as_one_without_gradients(tmp_path: Path) -> None:
    """The head is trained as by a loop in which the backbone needs no gradient, to the bit."""
    found = []
    for callbacks in ([BackboneFinetuning(9)], []):
        task = Parts()
        if not callbacks:
            for parameter in task.backbone[0].parameters():
                parameter.requires_grad_(False)
        quiet(tmp_path, max_epochs=2, callbacks=callbacks).fit(task, loader(24))
        found.append(weights(task))
    assert torch.equal(*found)


def test_the_backbones_rate_grows_to_its_groups(tmp_path: Path) -> None:
    """From its epoch on the backbone has the given share of its groups' rate,
    doubled each epoch up to all of it.
    """
    watch = Watch()
    callbacks = [BackboneFinetuning(1, backbone_initial_ratio_lr=0.3), watch]
    quiet(tmp_path, max_epochs=4, callbacks=callbacks).fit(Parts(), loader(24))
    for epoch, share in ((1, 0.3), (2, 0.6), (3, 1.0)):
        lr = 0.1 * 0.9 ** (6 * epoch)
        assert watch.rates[epoch] == pytest.approx([lr * share, lr * share, lr, lr])


@pytest.mark.parametrize("stop_at", [3, 6, 9, 12, 14])
@pytest.mark.parametrize("train_bn", [True, False])
def test_going_on_changes_no_bit(tmp_path: Path, stop_at: int, train_bn: bool) -> None:
    """Stopped before, at and after the thaw,
    the run ends with the bits of the run that never stopped.
    """
    ends = []
    for name, steps in (("whole", [20]), ("parts", [stop_at, 20])):
        lrs: list[float] = []
        for steps_now in steps:
            task, recorder = Parts(), Recorder()
            finetuning = BackboneFinetuning(2, train_bn=train_bn, backbone_initial_ratio_lr=0.1)
            trainer = quiet(
                tmp_path / name,
                max_steps=steps_now,
                callbacks=[finetuning, recorder, ModelCheckpoint()],
            )
            ckpt_path = "last" if len(steps) > 1 and steps_now == 20 else None
            trainer.fit(task, loader(24, shuffle=True), loader(5), ckpt_path=ckpt_path)
            lrs += recorder.lrs
        ends.append((task.state_dict(), lrs))
    (whole, lrs_whole), (parts, lrs_parts) = ends
    assert lrs_whole == lrs_parts
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


class Stages(BaseFinetuning):
    """Thaws one part in epoch 1 and freezes another in epoch 2."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[int] = []

    def freeze_before_training(self, task: Any) -> None:
        """Freeze the backbone."""
        self.freeze(task.backbone, train_bn=False)

    def finetune_function(self, task: Any, epoch: int, optimizer: Any) -> None:
        """Change which parts are trained."""
        self.called.append(epoch)
        if epoch == 1:
            self.make_trainable([task.backbone[0]])
        if epoch == 2:
            self.freeze(task.head)


def test_ones_own_schedule(tmp_path: Path) -> None:
    """freeze and make_trainable in finetune_function set the trained parts of each epoch;
    norms stay frozen until thawed.
    """
    watch, stages = Watch(), Stages()
    quiet(tmp_path, max_epochs=3, callbacks=[stages, watch]).fit(Parts(), loader(24))
    assert stages.called == [0, 1, 2]
    assert watch.changed == [HEAD, HEAD | LINEAR, LINEAR]


def test_a_resumed_run_has_the_epochs_before(tmp_path: Path) -> None:
    """finetune_function is called for the epochs before the restart, too,
    so that its effects persist.
    """
    for epochs, ckpt_path in ((3, None), (4, "last")):
        watch, stages = Watch(), Stages()
        settings: dict[str, Any] = {
            "max_epochs": epochs,
            "callbacks": [stages, watch],
            "enable_checkpointing": True,
        }
        quiet(tmp_path, **settings).fit(Parts(), loader(24), ckpt_path=ckpt_path)
    assert stages.called == [0, 1, 2, 3]
    assert watch.changed == [LINEAR]


@pytest.mark.parametrize(
    ("epochs", "settings", "words"),
    [
        (9, {}, "in all 3 epochs."),
        (2, {}, "before epoch 3. Then at its groups' rate, where Lightning begins at a tenth"),
        (
            2,
            {"backbone_initial_ratio_lr": 0.25, "lr_growth": 1.5},
            "before epoch 3. Then at 0.25 of its groups' rate, times 1.5 each epoch.",
        ),
        (2, {"train_bn": False}, "train_bn=False: its batch norms are frozen until then"),
    ],
)
def test_it_says_what_is_frozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: int, settings: Any, words: str
) -> None:
    """A line says what is not trained, until when, and at which rate it is then."""
    callback = BackboneFinetuning(epochs, ["backbone.0", "head"], **settings)
    quiet(tmp_path, max_epochs=3, callbacks=callback).fit(Parts(), loader(8))
    said = " ".join(capsys.readouterr().out.split())
    assert "Finetuning: backbone.0, head not trained" in said and words in said
    assert said.count("Then at") == (epochs == 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "bakbone",
            (
                r"'bakbone', which is no module of Parts\. Did you mean 'backbone'\?.* In Parts"
                r" there are .*backbone, head"
            ),
        ),
        (
            "backbone.3",
            (
                r"'backbone\.3', which is no module.* In Parts\.backbone there are backbone\.0,"
                r" backbone\.1, backbone\.2"
            ),
        ),
        ("", "'', which is no module"),
    ],
)
def test_an_unknown_module_is_named(tmp_path: Path, name: str, words: str) -> None:
    """A module that the task does not have is refused, with the existing ones."""
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, callbacks=BackboneFinetuning(1, ["head", name])).fit(Parts(), loader(8))


class Filters(Parts):
    """Gives the optimizer only the parameters trained at first."""

    def configure_optimizers(self) -> Any:
        """Return SGD without the frozen parameters."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("callback", [BackboneFinetuning(1), Stages()])
def test_a_thaw_that_no_optimizer_would_see_is_refused(tmp_path: Path, callback: Any) -> None:
    """A parameter that would be thawed and never trained is an error that names it."""
    with pytest.raises(
        TaskError,
        match=r"backbone\.0\.weight( and 2 more)? would be trained after a thaw, but no optimizer",
    ):
        quiet(tmp_path, max_epochs=2, callbacks=callback).fit(Filters(), loader(8))


def test_a_rate_of_its_own_needs_groups_of_its_own(tmp_path: Path) -> None:
    """A ratio below 1 is refused if a group holds more than the backbone."""

    class Together(Parts):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(TaskError, match=r"a group holds 3 of its parameters and 2 others"):
        quiet(tmp_path, callbacks=BackboneFinetuning(0, backbone_initial_ratio_lr=0.1)).fit(
            Together(), loader(8)
        )


@pytest.mark.parametrize(
    "settings",
    [{"unfreeze_backbone_at_epoch": -1}, {"backbone_initial_ratio_lr": 1.5}, {"lr_growth": 0}],
)
def test_bad_settings_are_refused(settings: Any) -> None:
    """An illegal setting is refused by name."""
    with pytest.raises(ConfigError, match=f"BackboneFinetuning.{next(iter(settings))} is"):
        BackboneFinetuning(**settings)


class Late(BaseFinetuning):
    """Trains a second layer from epoch 1 on, as a group that was not there."""

    def freeze_before_training(self, task: Any) -> None:
        """Freeze it."""
        self.freeze(task.extra)

    def finetune_function(self, task: Any, epoch: int, optimizer: Any) -> None:
        """Add it."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.extra, optimizer, lr=0.01)


class TwoLayers(Line):
    """A line with a second layer, whose optimizer begins with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 1)
        fill(self.extra)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the squared error of the sum of both."""
        return (self.model(batch[0]) + self.extra(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return an optimizer of what is trained, under a schedule."""
        optimizer = torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9
        )
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def test_a_group_that_is_added_is_scaled_and_scheduled(tmp_path: Path) -> None:
    """Its rate is scaled for the ranks, and moved by the schedulers from the next epoch on;
    all ranks train it alike.
    """

    def work(engine: Any) -> Any:
        task = TwoLayers()
        trainer = quiet(tmp_path, engine=engine, max_epochs=3, callbacks=[Late()])
        trainer.fit(task, loader(16))
        return trainer.run.rates.last(), task.extra.weight.detach().clone()

    (rates, one), (_, other) = World(2).run(work)
    assert rates == [pytest.approx(2 * 0.05 * 0.25), pytest.approx(2 * 0.01 * 0.25)]
    assert torch.equal(one, other)


class Divided(BaseFinetuning):
    """Late, at the default rate: a tenth of the first group's."""

    def freeze_before_training(self, task: Any) -> None:
        """Freeze it."""
        self.freeze(task.extra)

    def finetune_function(self, task: Any, epoch: int, optimizer: Any) -> None:
        """Add it."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.extra, optimizer)


class Rates(Callback):
    """Keeps the rates of each step that has two groups."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Keep them."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps += [rates] if len(rates) == 2 else []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("warmup", [0, 9])
def test_a_group_at_the_default_rate_moves_with_the_first(
    warmup: int, ranks: int, tmp_path: Path
) -> None:
    """From its first step on, through the rest of a warm-up and under a schedule that computes
    from first rates.
    """

    def work(engine: Any) -> Any:
        rates = Rates()
        trainer = quiet(
            tmp_path,
            engine=engine,
            max_epochs=3,
            lr_warmup_steps=warmup,
            callbacks=[Divided(), rates],
        )
        trainer.fit(TwoLayers(), loader(16 * ranks))
        return rates.steps

    for steps in World(ranks).run(work):
        assert len(steps) == 8
        assert [own for _, own in steps] == pytest.approx([first / 10 for first, _ in steps])
        assert steps[-1][0] == pytest.approx(ranks * 0.05 * 0.25)


def test_a_group_at_a_rate_of_its_own_is_in_warm_up(tmp_path: Path) -> None:
    """In its first step too."""
    rates = Rates()
    settings: dict[str, Any] = {"max_epochs": 2, "lr_warmup_steps": 10}
    quiet(tmp_path, callbacks=[Late(), rates], **settings).fit(TwoLayers(), loader(16))
    assert [own for _, own in rates.steps] == pytest.approx([0.005, 0.006, 0.007, 0.008])


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [Late, Divided])
def test_a_run_with_such_a_group_is_resumed(
    kind: Any, ranks: int, warmup: int, tmp_path: Path
) -> None:
    """A run that stops after the group was added, also inside that epoch,
    ends as one that did not stop.
    """

    def train(folder: str, stop: int | None = None, ckpt_path: str | None = None) -> Any:
        def work(engine: Any) -> Any:
            task, callbacks = TwoLayers(), [kind(), ModelCheckpoint(every_n_train_steps=1)]
            limits = {"max_epochs": 4, "lr_warmup_steps": warmup}
            limits |= {} if stop is None else {"max_steps": stop}
            trainer = quiet(
                tmp_path / folder,
                engine=engine,
                callbacks=callbacks,
                enable_checkpointing=True,
                **limits,
            )
            trainer.fit(task, loader(16), ckpt_path=ckpt_path)
            momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
            return trainer.run.rates.last(), [*task.parameters(), *momenta]

        return World(ranks).run(work)

    whole = train("whole")
    steps = 4 * 16 // (4 * ranks)
    for stop in (steps // 4 + 1, steps // 2):
        train(f"stopped {stop}", stop)
        resumed = train(f"stopped {stop}", ckpt_path="last")
        for (rates, tensors), (expected, others) in zip(resumed, whole, strict=True):
            assert rates == expected and len(rates) == 2
            assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


KINDS: dict[str, Callable[[Any], Any]] = {
    "plateau": lambda own: sched.ReduceLROnPlateau(own, patience=0, threshold=1e9, min_lr=0.002),
    "multiplicative": lambda own: sched.MultiplicativeLR(own, lambda epoch: 0.5),
    "chain": lambda own: sched.ChainedScheduler(
        [sched.ExponentialLR(own, 0.9), sched.LambdaLR(own, lambda epoch: 0.9**epoch)]
    ),
    "sequence": lambda own: sched.SequentialLR(
        own, [sched.LinearLR(own, total_iters=1), sched.CosineAnnealingLR(own, 5)], [2]
    ),
    "cycle": lambda own: sched.CyclicLR(own, 0.01, 0.1),
    "one cycle": lambda own: sched.OneCycleLR(own, 0.1, total_steps=9),
}


class Scheduled(TwoLayers):
    """TwoLayers under a scheduler of epochs, by its name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        """Return an optimizer of what is trained, under that scheduler."""
        optimizer = torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9
        )
        schedule = {"scheduler": KINDS[self.kind](optimizer), "monitor": "train/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the loss."""
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("kind", ["plateau", "multiplicative", "chain", "sequence"])
def test_a_group_is_added_under_any_scheduler(kind: str, tmp_path: Path) -> None:
    """It moves with the first group, and the run resumes."""
    ends = []
    for folder, epochs in (("whole", [4]), ("parts", [2, 4])):
        for number in epochs:
            task = Scheduled(kind)
            trainer = quiet(
                tmp_path / folder, max_epochs=number, callbacks=[Late()], enable_checkpointing=True
            )
            ckpt_path = "last" if number != epochs[0] else None
            trainer.fit(task, loader(16), ckpt_path=ckpt_path)
        ends.append((trainer.run.rates.last(), weights(task)))
    (whole, one), (parts, other) = ends
    assert whole == parts and torch.equal(one, other)
    assert len(whole) == 2 and whole[1] < 0.01


@pytest.mark.parametrize("kind", ["cycle", "one cycle"])
def test_a_group_under_a_cycle_is_refused(kind: str, tmp_path: Path) -> None:
    """Such schedulers have limits for each group, which one that is added later lacks."""
    words = r"unfreeze_and_add_param_group: (CyclicLR|OneCycleLR) has limits .*make_trainable"
    with pytest.raises(TaskError, match=words):
        quiet(tmp_path, max_epochs=3, callbacks=[Late()]).fit(Scheduled(kind), loader(16))


def test_a_group_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """The checkpoint of a run that added a layer that this task
    does not have names the parameter.
    """

    class Renamed(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.more = self.extra
            del self.extra

    state = {"added": [{"optimizer": 0, "names": ["extra.weight"], "settings": {"lr": 0.01}}]}
    callback = Late()
    callback._task, callback._added = Renamed(), []
    with pytest.raises(
        CheckpointError,
        match="added extra.weight to an optimizer, and Renamed has no such parameter",
    ):
        callback.load_state_dict(state)


def test_norms_that_are_not_thawed_need_no_group(tmp_path: Path) -> None:
    """unfreeze_and_add_param_group(train_bn=False) trains the rest, and leaves the norms frozen,
    as published scripts do.
    """

    class Rest(BaseFinetuning):
        def freeze_before_training(self, task: Any) -> None:
            self.freeze(task.backbone, train_bn=False)

        def finetune_function(self, task: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(task.backbone, optimizer, train_bn=False)

    class Head(Parts):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    watch = Watch()
    quiet(tmp_path, max_epochs=2, callbacks=[Rest(), watch]).fit(Head(), loader(24))
    assert watch.changed == [HEAD, HEAD | LINEAR]
