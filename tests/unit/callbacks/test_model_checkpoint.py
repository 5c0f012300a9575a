"""ModelCheckpoint: when a checkpoint is written, which are kept,
and what `last` and `best` point to.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torchmetrics
from torch import nn

from tests.helpers.resuming import assert_same_run
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import EMA, ModelCheckpoint
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.format import MANIFEST
from trainkit.checkpoint.places import make_store
from trainkit.errors import ConfigError, Preempted
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer


class Scored(Line):
    """Logs the scores that it is given, one for each validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def on_validation_start(self) -> None:
        """Take the next score."""
        self.score = next(self.scores, 0.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.log("val/score", self.score)


def run(tmp_path: Path, keeper: ModelCheckpoint, scores: list[float], **settings: Any) -> Path:
    """Train an epoch of two steps for each score, and return the folder of checkpoints."""
    known: dict[str, Any] = {"max_epochs": len(scores), "num_sanity_val_steps": 0}
    ckpt_path = settings.pop("ckpt_path", None)
    quiet(tmp_path, **({"callbacks": keeper} | known | settings)).fit(
        Scored(scores), loader(8), loader(4), ckpt_path=ckpt_path
    )
    return tmp_path / "checkpoints"


def kept(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are there."""
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def target(folder: Path, link: str) -> str:
    """Return the name of the checkpoint that a link points to, which must be whole."""
    ckpt.verify(folder / link)
    return (folder / link).resolve().name


def test_saves_and_steps_that_are_not_saved_are_printed_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verbose=True names the checkpoint, its score and the best one."""
    keeper = ModelCheckpoint(monitor="val/score", save_last=False, verbose=True)
    run(tmp_path, keeper, [3.0, 4.0, 1.0])
    printed = [line for line in capsys.readouterr().out.splitlines() if "Checkpoint epoch" in line]
    assert printed == [
        "Checkpoint epoch=0-step=2 (val/score = 3) is saved; best is epoch=0-step=2.",
        "Checkpoint epoch=1-step=4 (val/score = 4) is not saved: others are better.",
        "Checkpoint epoch=2-step=6 (val/score = 1) is saved; best is epoch=2-step=6.",
    ]


def test_a_step_without_a_value_is_printed_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value of other weights is none of it, and is not NaN."""
    keeper = ModelCheckpoint(monitor="val/score", verbose=True)
    run(tmp_path, keeper, [3.0, 4.0], check_val_every_n_epoch=2, max_epochs=3)
    out = capsys.readouterr().out
    assert "epoch=2-step=6 (without val/score of this step) is saved" in out and "nan" not in out


def test_without_a_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    """By default one checkpoint is kept, that of the last epoch, and both links point to it."""
    folder = run(tmp_path, ModelCheckpoint(), [0, 0, 0])
    assert kept(folder) == ["epoch=2-step=6"]
    assert target(folder, "last") == target(folder, "best") == "epoch=2-step=6"


@pytest.mark.parametrize(
    ("mode", "top", "names", "best"),
    [
        ("min", 1, ["epoch=1-step=4", "epoch=3-step=8"], "epoch=1-step=4"),
        ("max", 1, ["epoch=2-step=6", "epoch=3-step=8"], "epoch=2-step=6"),
        ("min", 2, ["epoch=0-step=2", "epoch=1-step=4", "epoch=3-step=8"], "epoch=1-step=4"),
        ("max", 2, ["epoch=2-step=6", "epoch=3-step=8"], "epoch=2-step=6"),
        (
            "min",
            -1,
            ["epoch=0-step=2", "epoch=1-step=4", "epoch=2-step=6", "epoch=3-step=8"],
            "epoch=1-step=4",
        ),
    ],
)
def test_the_best_and_the_last_are_kept(
    tmp_path: Path, mode: Any, top: int, names: list[str], best: str
) -> None:
    """The best `save_top_k` by the monitored value are kept, and the last one always."""
    keeper = ModelCheckpoint(monitor="val/score", mode=mode, save_top_k=top)
    folder = run(tmp_path, keeper, [3.0, 1.0, 9.0, 5.0])
    assert kept(folder) == names
    assert (target(folder, "best"), target(folder, "last")) == (best, "epoch=3-step=8")
    assert keeper.best_model_path == str(folder / best)
    assert keeper.best_model_score == (1.0 if mode == "min" else 9.0)


def test_of_equal_scores_the_first_is_best(tmp_path: Path) -> None:
    """A later checkpoint must be better to take the place of the best."""
    folder = run(tmp_path, ModelCheckpoint(monitor="val/score"), [1.0, 1.0, 1.0])
    assert (target(folder, "best"), target(folder, "last")) == ("epoch=0-step=2", "epoch=2-step=6")


def test_a_step_that_was_left_out_replaces_none(tmp_path: Path) -> None:
    """Before its validation it has no score, and after it a worse one than the best."""
    every = {"every_n_train_steps": 2, "every_n_epochs": 1}
    keeper = ModelCheckpoint(monitor="val/score", save_last=False, **every)
    assert kept(run(tmp_path, keeper, [1.0, 3.0, 2.0])) == ["epoch=0-step=2"]
    assert keeper.best_model_score == 1.0


class Ends(Callback):
    """Sends SIGTERM in the batch before a step's end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Send it once."""
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(tmp_path: Path, keeper: ModelCheckpoint, step: int) -> list[str]:
    """Train with a first score of 1 until a signal after a step; return what is there."""
    with pytest.raises(Preempted):
        run(tmp_path, keeper, [1.0, 3.0], callbacks=[keeper, Ends(step)])
    return kept(tmp_path / "checkpoints")


def test_what_a_signal_left_does_not_cost_the_best(tmp_path: Path) -> None:
    """The step that it ended is saved again with its score, and replaces itself alone."""
    keeper = ModelCheckpoint(monitor="val/score", save_last=False)
    left = preempted(tmp_path, keeper, 4)
    assert left == ["epoch=0-step=2", "epoch=1-step=4"]
    folder = run(
        tmp_path, keeper, [3.0], max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / left[1])
    )
    assert kept(folder) == ["epoch=0-step=2"]
    assert target(folder, "best") == "epoch=0-step=2"
    assert keeper.best_model_score == 1.0


def test_a_signal_saves_a_step_that_was_left_out(tmp_path: Path) -> None:
    """It was not among the best; to resume from it is another matter."""
    keeper = ModelCheckpoint(
        monitor="val/score", save_last=False, every_n_train_steps=1, every_n_epochs=1
    )
    assert preempted(tmp_path, keeper, 3) == ["epoch=0-step=2", "epoch=1-step=3"]


def test_one_name_for_all_keeps_the_best(tmp_path: Path) -> None:
    """A fixed `filename` is the best one's; the newest has a number behind it, unless it is best."""
    keeper = ModelCheckpoint(monitor="val/score", filename="model")
    folder = run(tmp_path, keeper, [3.0, 1.0, 2.0, 4.0])
    assert kept(folder) == ["model", "model-v1"]
    assert (target(folder, "best"), target(folder, "last")) == ("model", "model-v1")
    assert ckpt.verify(folder / "model")["metrics"]["val/score"] == 1.0
    assert ckpt.verify(folder / "model-v1")["metrics"]["val/score"] == 4.0
    quiet(tmp_path, callbacks=keeper, max_epochs=5, num_sanity_val_steps=0).fit(
        Scored([0.5]), loader(8), loader(4), ckpt_path="last"
    )
    assert kept(folder) == ["model"]
    assert ckpt.verify(folder / "model")["global_step"] == 10


def test_all_ranks_write_into_rank_0s_name(tmp_path: Path) -> None:
    """What each has seen of the disk may differ."""

    def work(engine: ThreadEngine) -> str:
        keeper = ModelCheckpoint(monitor="val/score", filename="model", save_top_k=-1)

        class Differs(Callback):
            def on_train_start(self, trainer: Any, task: Any) -> None:
                if trainer.global_rank:
                    keeper._retention.name_for = lambda *_: "another"  # type: ignore[method-assign]

        each: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
        quiet(tmp_path, engine=engine, callbacks=[keeper, Differs()], **each).fit(
            Scored([3.0, 1.0]), loader(8), loader(4)
        )
        return Path(keeper.last_model_path).name

    assert World(2).run(work) == ["model-v1"] * 2


def test_a_score_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    """NaN never counts as best."""
    for mode in ("min", "max"):
        keeper = ModelCheckpoint(monitor="val/score", mode=mode, dirpath=str(tmp_path / mode))
        run(tmp_path, keeper, [math.nan, 2.0, math.nan])
        assert target(tmp_path / mode, "best") == "epoch=1-step=4"


@pytest.mark.parametrize(
    ("every", "names"),
    [
        ({"every_n_epochs": 2}, ["epoch=1-step=4", "epoch=3-step=6"]),
        ({"every_n_epochs": None, "every_n_train_steps": 4}, ["epoch=1-step=4", "epoch=3-step=6"]),
        ({"every_n_epochs": None, "every_n_train_steps": 5}, ["epoch=2-step=5", "epoch=3-step=6"]),
        ({"every_n_epochs": 0}, ["epoch=3-step=6"]),
        (
            {"every_n_train_steps": 1, "every_n_epochs": 1},
            [f"epoch={(s - 1) // 2}-step={s}" for s in range(1, 7)],
        ),
    ],
)
def test_checkpoints_come_when_asked_for(
    tmp_path: Path, every: dict[str, Any], names: list[str]
) -> None:
    """Checkpoints are written each n epochs, each n steps,
    and at the end of training, each step once.
    """
    assert kept(run(tmp_path, ModelCheckpoint(save_top_k=-1, **every), [0, 0, 0])) == names


def test_a_step_at_an_epochs_end_is_scored_by_its_own_validation(tmp_path: Path) -> None:
    """Where steps and epochs ask for the same step,
    its score is that of the validation after it.
    """
    keeper = ModelCheckpoint(monitor="val/score", every_n_train_steps=2, every_n_epochs=1)
    folder = run(tmp_path, keeper, [3.0, 1.0, 2.0])
    assert target(folder, "best") == "epoch=1-step=4"
    assert kept(folder) == ["epoch=1-step=4", "epoch=2-step=6"]
    assert ckpt.verify(folder / "best")["metrics"]["val/score"] == 1.0


def test_before_the_first_validation_a_checkpoint_ranks_last(tmp_path: Path) -> None:
    """A checkpoint inside the first epoch has no score yet;
    it is written, and any scored one is better.
    """
    keeper = ModelCheckpoint(
        monitor="val/score", every_n_train_steps=1, every_n_epochs=1, save_top_k=2
    )
    folder = run(tmp_path, keeper, [7.0, 8.0])
    assert target(folder, "best") == "epoch=0-step=2"


def test_a_monitor_that_was_not_logged_is_named(tmp_path: Path) -> None:
    """A value that is not logged is an error that lists those that there are."""
    with pytest.raises(
        ConfigError,
        match=(
            r"ModelCheckpoint\.monitor is .*, which was not logged for an epoch; there are"
            r" val/score\."
        ),
    ):
        run(tmp_path, ModelCheckpoint(monitor="val/los"), [1.0])


def test_a_name_has_no_value_of_other_weights(tmp_path: Path) -> None:
    """Epochs without a validation have none, before the first as after it; the run continues."""
    keeper = ModelCheckpoint(filename="{epoch}-{val/score:.1f}", save_top_k=-1)
    folder = run(tmp_path, keeper, [3.0, 4.0], check_val_every_n_epoch=2, max_epochs=4)
    assert kept(folder) == [
        "epoch=0-val_score=nan",
        "epoch=1-val_score=3.0",
        "epoch=2-val_score=nan",
        "epoch=3-val_score=4.0",
    ]


def test_a_name_has_no_value_of_other_weights_after_a_resume(tmp_path: Path) -> None:
    """Which values are of validations is saved."""

    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(filename="{epoch}-{val/score:.1f}", save_top_k=-1)

    run(tmp_path, keeper(), [3.0], check_val_every_n_epoch=2, max_epochs=2)
    settings = {"check_val_every_n_epoch": 2, "max_epochs": 3, "ckpt_path": "last"}
    assert "epoch=2-val_score=nan" in kept(run(tmp_path, keeper(), [4.0], **settings))


def test_names_hold_logged_values(tmp_path: Path) -> None:
    """Names of logged values are filled in, with "/" as "_"; unknown ones are refused."""
    folder = run(
        tmp_path,
        ModelCheckpoint(filename="e{epoch:02d}-{val_score:.1f}", auto_insert_metric_name=False),
        [1.25],
    )
    assert kept(folder) == ["e00-1.2"]
    slashed = run(tmp_path / "slashed", ModelCheckpoint(filename="{epoch}-{val/score:.1f}"), [1.25])
    assert kept(slashed) == ["epoch=0-val_score=1.2"]
    with pytest.raises(
        ConfigError,
        match=r"filename is '\{acc\}', but 'acc' is not known; there are epoch, step, val_score",
    ):
        run(tmp_path / "other", ModelCheckpoint(filename="{acc}"), [1.0])


def test_a_logged_value_may_be_called_step(tmp_path: Path) -> None:
    """A task that logs "step" or "epoch" does not disturb the names."""

    class Steps(Scored):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"step": 99.0, "epoch": 99.0})

    quiet(tmp_path, enable_checkpointing=True).fit(Steps([]), loader(8), loader(4))
    assert kept(tmp_path / "checkpoints") == ["epoch=0-step=2"]


def test_weights_alone(tmp_path: Path) -> None:
    """save_weights_only leaves out the training state."""
    folder = run(tmp_path, ModelCheckpoint(save_weights_only=True), [1.0])
    assert sorted(p.name for p in (folder / "last").iterdir()) == [
        "manifest.json",
        "weights.safetensors",
    ]


def test_a_failed_write_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the disk takes no more, the older checkpoints and the links stay, it is reported,
    and training continues.
    """
    real = ckpt.write

    def full_from_the_second_on(folder: Path, *args: Any) -> None:
        if "epoch=0-step=2" not in folder.name:
            raise OSError("No space left on device")
        real(folder, *args)

    monkeypatch.setattr("trainkit.checkpoint.store.write", full_from_the_second_on)
    keeper = ModelCheckpoint()
    folder = run(tmp_path, keeper, [0, 0, 0])
    assert kept(folder) == ["epoch=0-step=2"]
    assert target(folder, "last") == target(folder, "best") == "epoch=0-step=2"
    assert keeper.last_model_path == str(folder / "epoch=0-step=2")
    message = capsys.readouterr().out
    assert message.count("was NOT written: No space left on device. Older ones are left.") == 2
    assert re.search(r"Checkpoints that were NOT written: \S+step=4, \S+step=6\.", message)


def test_a_failed_write_leaves_the_last_one_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes once another is written, and not before."""
    real = ckpt.write

    def full(folder: Path, *args: Any) -> None:
        if "step=5" in folder.name:
            raise OSError("No space left on device")
        real(folder, *args)

    monkeypatch.setattr("trainkit.checkpoint.store.write", full)
    keeper = ModelCheckpoint(monitor="val/score", save_last=False)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in (3, 5):
                keeper.save_now(trainer)

    assert kept(run(tmp_path, keeper, [1.0, 2.0, 0.5], callbacks=[keeper, Saves()])) == [
        "epoch=2-step=6"
    ]


def test_one_callback_serves_two_runs(tmp_path: Path) -> None:
    """A callback that was used before saves a second run of the same length too."""
    keeper = ModelCheckpoint()
    for name in ("first", "second"):
        assert kept(run(tmp_path / name, keeper, [0])) == ["epoch=0-step=2"]


@pytest.mark.parametrize("arguments", [{"save_top_k": 0, "save_last": False}, {"save_top_k": -2}])
def test_keeping_none_is_refused(arguments: dict[str, Any]) -> None:
    """save_top_k is 1 or more, or -1, or 0 beside the last."""
    with pytest.raises(
        ConfigError,
        match=rf"save_top_k is {arguments['save_top_k']}; it must be 1 or more, -1 to retain all, or 0",
    ):
        ModelCheckpoint(**arguments)


def test_none_but_the_last_is_kept(tmp_path: Path) -> None:
    """save_top_k=0 keeps the newest alone, whatever its score, and `best` is not set."""
    keeper = ModelCheckpoint(monitor="val/score", save_top_k=0)
    folder = run(tmp_path, keeper, [1.0, 2.0, 3.0])
    assert kept(folder) == ["epoch=2-step=6"]
    assert target(folder, "last") == "epoch=2-step=6"


def test_without_the_last_only_the_best_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save_last=false writes nothing for one that is not among the best, and sets no `last`."""
    names: list[str] = []
    real = ckpt.write

    def noted(folder: Path, *args: Any) -> None:
        names.append(folder.name.split(".")[1])
        real(folder, *args)

    monkeypatch.setattr("trainkit.checkpoint.store.write", noted)
    keeper = ModelCheckpoint(monitor="val/score", save_last=False)
    folder = run(tmp_path, keeper, [2.0, 3.0, 1.0, 5.0])
    assert names == ["epoch=0-step=2", "epoch=2-step=6"]
    assert kept(folder) == ["epoch=2-step=6"]
    assert target(folder, "best") == "epoch=2-step=6"
    assert not (folder / "last").exists()


def test_without_the_last_none_is_written_where_training_ends(tmp_path: Path) -> None:
    """save_last=false leaves out the checkpoint at the end of training."""
    folder = run(tmp_path, ModelCheckpoint(save_last=False, every_n_epochs=2), [0, 0, 0])
    assert kept(folder) == ["epoch=1-step=4"]


def test_a_checkpoint_comes_when_the_time_is_over(tmp_path: Path) -> None:
    """train_time_interval saves in the first step after so long by the pulse's clock,
    and counts from there; set-up is none.
    """

    class Hours(Callback):
        def on_fit_start(self, trainer: RunView, task: Any) -> None:
            trainer.coordinator._started -= 7777.0  # what was before the first step took long

        def on_train_step_start(self, trainer: RunView, task: Any) -> None:
            trainer.coordinator.beat = lambda: None  # type: ignore[assignment, return-value]
            trainer.coordinator.now = 7777.0 + trainer.global_step * 1000.0

    keeper = ModelCheckpoint(train_time_interval="00:49:00", every_n_epochs=None, save_top_k=-1)
    quiet(tmp_path, max_epochs=5, callbacks=[Hours(), keeper]).fit(Line(), loader(8))
    assert kept(tmp_path / "checkpoints") == ["epoch=1-step=4", "epoch=3-step=7", "epoch=5-step=10"]


class Dies(Line):
    """Momentum and dropout; fails where it is asked to:
    in a step, in its validation, or while weights are being changed.
    """

    def __init__(self, where: str = "", step: int = -1, rank: int = 0) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.where, self.step, self.rank = where, step, rank

    def make_model(self) -> nn.Module:
        """Return the model: 3 numbers in, 1 out."""
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def _die(self, where: str) -> None:
        if (where, self.trainer.global_step, self.trainer.global_rank) == (
            self.where,
            self.step,
            self.rank,
        ):
            raise ValueError(f"in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Fail behind the logging: what it drew and logged must not count."""
        loss = super().training_step(batch, batch_idx)
        self.log("train/epoch", loss, on_step=False, on_epoch=True)
        self._die("step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Draw random numbers, and fail."""
        torch.rand(3)
        super().validation_step(batch, batch_idx)
        self._die("validation")

    def configure_optimizers(self) -> Any:
        """SGD that fails behind its update."""
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self._die("update"))
        return optimizer


def train(
    folder: Path, task: Dies, *callbacks: Callback, **settings: Any
) -> tuple[Trainer, ModelCheckpoint]:
    """Train two epochs of 6 steps with validation each 3, from "auto";
    nothing is saved but after an error and at the end.
    """
    keeper = ModelCheckpoint(save_on_exception=True, every_n_epochs=0, save_top_k=-1)
    known: dict[str, Any] = {
        "max_epochs": 2,
        "val_check_interval": 3,
        "log_every_n_steps": 1,
        "logger": CSVLogger(),
    }
    trainer = quiet(folder, callbacks=[*callbacks, keeper], **(known | settings))
    trainer.fit(task, loader(23, shuffle=True), loader(11), ckpt_path="auto")
    return trainer, keeper


@pytest.mark.parametrize(
    ("where", "step"),
    [("step", 1), ("step", 4), ("step", 6), ("step", 11), ("validation", 3), ("validation", 6)],
)
def test_a_run_resumes_from_before_the_step_that_failed(
    tmp_path: Path, where: str, step: int
) -> None:
    """What an error left is the state before its step (or validation):
    resumed, the run ends like one without error.
    """
    train(tmp_path / "whole", Dies())
    with pytest.raises(ValueError, match=f"in {where}"):
        train(tmp_path / "parts", Dies(where, step))
    (name,) = kept(tmp_path / "parts" / "checkpoints")
    assert name.endswith(f"-step={step}-exception")
    train(tmp_path / "parts", Dies())
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_an_error_in_the_middle_of_an_accumulation_undoes_all_of_the_step(tmp_path: Path) -> None:
    """The microbatches of the step that failed are trained on again, all of them."""
    train(tmp_path / "whole", Dies(), accumulate_grad_batches=2, val_check_interval=None)

    class Second(Dies):
        def _die(self, where: str) -> None:
            if where == "step" and self.trainer.state.batch_idx == 3:
                raise ValueError("in the second microbatch of step 2")

    with pytest.raises(ValueError, match="second microbatch"):
        train(tmp_path / "parts", Second(), accumulate_grad_batches=2, val_check_interval=None)
    train(tmp_path / "parts", Dies(), accumulate_grad_batches=2, val_check_interval=None)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_an_error_while_weights_are_changed_leaves_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an update is nothing to resume from, which is said."""
    with pytest.raises(ValueError, match="in update"):
        train(tmp_path, Dies("update", 4))
    assert not (tmp_path / "checkpoints").exists()
    assert (
        "No checkpoint of this error: it occurred while the weights were being changed."
        in capsys.readouterr().out
    )


def test_without_the_setting_an_error_leaves_no_checkpoint(tmp_path: Path) -> None:
    """By default an error writes nothing."""
    with pytest.raises(ValueError, match="in step"):
        quiet(tmp_path, callbacks=ModelCheckpoint(every_n_epochs=0)).fit(
            Dies("step", 4), loader(23)
        )
    assert not (tmp_path / "checkpoints").exists()


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    """An error in the first step leaves no checkpoint: a run can begin again."""
    with pytest.raises(ValueError, match="in step"):
        train(tmp_path, Dies("step", 0))
    assert not (tmp_path / "checkpoints").exists()


# rank 0 may just be leaving the collective before
@pytest.mark.parametrize(("rank", "steps"), [(0, {4}), (1, {3, 4})])
def test_at_several_ranks_rank_0_saves_alone(tmp_path: Path, rank: int, steps: set[int]) -> None:
    """Whichever rank fails, rank 0 saves what it has, as of the step before,
    and waits for no other.
    """

    class Plain(Dies):
        make_model = Line.make_model  # ranks that are threads share their random numbers

    def work(engine: ThreadEngine) -> None:
        train(tmp_path, Plain("step", 4, rank), engine=engine, logger=False)

    with pytest.raises(ValueError, match="in step"):
        World(2).run(work)
    (name,) = kept(tmp_path / "checkpoints")
    assert name.endswith("-exception")
    assert ckpt.verify(tmp_path / "checkpoints" / "last")["global_step"] in steps
    assert len(ckpt.load_training(tmp_path / "checkpoints" / "last")["random"]) == 1


@pytest.fixture
def url() -> Iterator[str]:
    """A place in memory that no other run has."""
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(place, recursive=True)


def test_checkpoints_lie_at_a_url(tmp_path: Path, url: str) -> None:
    """With a URL as dirpath the best and the last are kept there, both are pointed to,
    and nothing is in the run's folder.
    """
    keeper = ModelCheckpoint(monitor="val/score", dirpath=url)
    run(tmp_path, keeper, [3.0, 1.0, 2.0])
    store = make_store(url)
    assert store.names() == ["epoch=1-step=4", "epoch=2-step=6"]
    assert (store.target("best"), store.target("last")) == ("epoch=1-step=4", "epoch=2-step=6")
    assert keeper.best_model_path == f"{url}/epoch=1-step=4"
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "start"),
    [("last", 6), ("best", 4), ("auto", 6), ("{url}/epoch=1-step=4", 4), ("{url}/best", 4)],
)
def test_a_run_resumes_from_a_url(tmp_path: Path, url: str, arguments: str, start: int) -> None:
    """`last`, `best`, "auto" and a checkpoint's own URL are found at the URL,
    also from a new run folder.
    """
    run(tmp_path / "first", ModelCheckpoint(monitor="val/score", dirpath=url), [3.0, 1.0, 2.0])
    begun: list[int] = []

    class Begun(Callback):
        def on_train_start(self, trainer: RunView, task: Any) -> None:
            begun.append(trainer.global_step)

    keeper = ModelCheckpoint(monitor="val/score", dirpath=url)
    trainer = quiet(tmp_path / "second", max_epochs=4, callbacks=[Begun(), keeper])
    trainer.fit(Scored([0.5, 0.4]), loader(8), loader(4), ckpt_path=arguments.format(url=url))
    assert begun == [start]
    assert make_store(url).target("best") == "epoch=3-step=8"


@pytest.mark.parametrize("place", ["folder", "url"])
def test_what_a_killed_run_no_longer_deleted_is_deleted_on_resume(
    tmp_path: Path, url: str, place: str
) -> None:
    """A checkpoint that another has replaced, and that is still there,
    goes when the run resumes.
    """
    dirpath = url if place == "url" else str(tmp_path / "here")
    store = make_store(dirpath)
    quiet(tmp_path, max_epochs=2, callbacks=ModelCheckpoint(dirpath=dirpath)).fit(Line(), loader(8))
    assert store.names() == ["epoch=1-step=4"]
    # as if killed before the one that it replaced was gone
    with store.fetch("epoch=1-step=4") as folder:
        store.write(
            "epoch=0-step=2",
            ckpt.Snapshot(ckpt.read_state(folder), {}, ckpt.load_training(folder), {}),
        )
    # another process's
    store.write("epoch=1-step=3", ckpt.Snapshot({"w": torch.zeros(1)}, {}, None, {}))
    quiet(tmp_path, max_epochs=2, callbacks=ModelCheckpoint(dirpath=dirpath)).fit(
        Line(), loader(8), ckpt_path=f"{dirpath}/epoch=1-step=4"
    )
    assert store.names() == ["epoch=1-step=3", "epoch=1-step=4"]


def test_what_the_others_did_is_saved_whatever_the_order_of_the_list(tmp_path: Path) -> None:
    """A ModelCheckpoint that stands first in the list saves what
    callbacks behind it did at the same hook.
    """

    class Adds(Callback):
        def on_train_epoch_end(self, trainer: RunView, task: Any) -> None:
            with torch.no_grad():
                task.model.bias.fill_(42.0)

    quiet(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(), Adds()]).fit(Line(), loader(8))
    assert float(ckpt.read_state(tmp_path / "checkpoints" / "last")["model.bias"]) == 42.0


def test_lightnings_other_values_are_taken() -> None:
    """None is its default; "link" is what `last` is here."""
    assert ModelCheckpoint(filename=None).filename == ModelCheckpoint().filename
    lasts = [ModelCheckpoint(save_last=value).save_last for value in ("link", True, None, False)]
    assert lasts == [True, True, False, False]


BAD = [
    ({"monitor": 3}, "monitor is 3; it must be"),
    ({"mode": "least"}, r"mode is 'least'; it must be"),
    ({"save_top_k": 1.5}, r"save_top_k is 1\.5; it must be"),
    ({"save_top_k": True}, r"save_top_k is true; it must be"),
    ({"save_last": "copy"}, r"save_last is 'copy'; it must be"),
    ({"every_n_epochs": -1}, r"every_n_epochs is -1; it must be"),
    ({"every_n_train_steps": -1}, r"every_n_train_steps is -1; it must be"),
    ({"every_n_train_steps": 2.5}, r"every_n_train_steps is 2\.5; it must be"),
    ({"train_time_interval": 0}, r"'?0'? is no duration|train_time_interval is 0"),
    ({"train_time_interval": "1 h"}, r"'1 h' is no duration|train_time_interval is '1 h'"),
    ({"save_on_exception": 1}, r"save_on_exception is 1; it must be"),
    ({"save_weights_only": "yes"}, r"save_weights_only is 'yes'; it must be"),
    (
        {"save_weights_only": True, "save_on_exception": True},
        r"save_on_exception is for resuming, and save_weights_only",
    ),
    ({"filename": 3}, r"filename is 3; it must be"),
    ({"dirpath": 3}, r"dirpath is 3; it must be"),
    ({"save_top": 3}, r"save_top"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=[str(arguments) for arguments, _ in BAD]
)
def test_a_bad_argument_is_refused_by_its_name(arguments: dict[str, Any], message: str) -> None:
    """Each argument of a wrong type or out of range is refused when the callback is made."""
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(**arguments)


@pytest.mark.parametrize("name", ["", ".hidden", "last", "best"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    """A filename that gives no folder of its own is refused."""
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.filename is "):
        run(tmp_path, ModelCheckpoint(filename=name), [1.0])


def test_an_unknown_place_is_refused(tmp_path: Path) -> None:
    """A URL that no file system is known for is refused before anything is trained."""
    with pytest.raises(ConfigError, match="'ftpp://host/x' cannot be written to"):
        run(tmp_path, ModelCheckpoint(dirpath="ftpp://host/x"), [1.0])


def test_two_in_one_place_are_refused(tmp_path: Path) -> None:
    """Two callbacks that would delete each other's checkpoints are refused, with the place."""
    with pytest.raises(
        ConfigError, match=r"Two ModelCheckpoints write to \S+checkpoints .*set a dirpath"
    ):
        quiet(tmp_path, callbacks=[ModelCheckpoint(), ModelCheckpoint(monitor="a")]).fit(
            Line(), loader(8)
        )


class Fragile(Net):
    """Batch norm and a metric object, and an error after the forward of a step."""

    dies = False

    def __init__(self) -> None:
        super().__init__()
        self.count = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Count, and raise where that is asked for."""
        loss = super().training_step(batch, batch_idx)
        self.count.update(len(batch[0]))
        self.log("train/count", self.count)
        if self.dies and self.global_step == 4:
            raise ValueError("broken")
        return loss


def test_an_error_leaves_the_statistics_of_the_step_before(tmp_path: Path) -> None:
    """Buffers and metric objects in what save_on_exception leaves are
    those from before the step that failed.
    """
    task, keeper = Fragile(), ModelCheckpoint(save_on_exception=True, every_n_epochs=0)
    task.dies = True
    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path, callbacks=keeper).fit(task, loader(23))
    assert int(ckpt.read_state(Path(keeper.last_model_path))["model.1.num_batches_tracked"]) == 4
    trainer = quiet(tmp_path)
    trainer.fit(Fragile(), loader(23), ckpt_path="last")
    assert trainer.callback_metrics["train/count"] == 23


def test_the_newest_checkpoint_has_the_epochs_end_also_where_a_step_had_saved(
    tmp_path: Path,
) -> None:
    """Where every_n_train_steps falls on an epoch's last step, the epoch's end is saved too."""

    class Tallies(Line):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("epochs", torch.zeros(()))

        def on_train_epoch_end(self) -> None:
            self.epochs += 1

    keeper = ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)
    quiet(tmp_path, max_epochs=2, callbacks=keeper).fit(Tallies(), loader(8))
    assert float(ckpt.read_state(Path(keeper.last_model_path))["epochs"]) == 2


@pytest.mark.parametrize(
    "filename", ["{epoch", "{}", "{0}", "{epoch.x}", "{epoch[0]}", "{epoch:q}"]
)
def test_a_filename_that_cannot_be_filled_in_is_refused(filename: str, tmp_path: Path) -> None:
    """A filename that is no good pattern is refused in words,
    most of them before anything is trained.
    """
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.filename is '\{.*'"):
        quiet(tmp_path, callbacks=ModelCheckpoint(filename=filename)).fit(Line(), loader(8))


def test_an_average_does_not_keep_rank_0_from_saving_alone(tmp_path: Path) -> None:
    """With EMA, whose buffers are sent when a checkpoint is taken,
    rank 0 saves alone after an error and waits for no other.
    """

    class Plain(Dies):
        # no dropout: ranks that are threads share their random numbers
        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def work(engine: ThreadEngine) -> None:
        train(tmp_path, Plain("step", 4, 0), EMA(), engine=engine, logger=False)

    with pytest.raises(ValueError, match="in step"):
        World(2).run(work)
    (name,) = kept(tmp_path / "checkpoints")
    assert name.endswith("-exception")


@pytest.mark.parametrize(
    "arguments", [{"monitor": "train/loss"}, {"filename": "{epoch}-{val_loss:.3f}"}]
)
def test_values_may_come_later_than_the_first_checkpoint(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """A checkpoint inside the first epoch may lack the value that is monitored,
    or stands in its name.
    """
    keeper = ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1, save_top_k=-1, **arguments)

    class Later(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss, on_step=False, on_epoch=True)
            return loss

    quiet(tmp_path, max_epochs=2, callbacks=keeper).fit(Later(), loader(8), loader(4))
    assert keeper.best_model_score is None or keeper.best_model_score >= 0
    assert len(kept(tmp_path / "checkpoints")) >= 2


def test_a_save_that_failed_costs_no_older_one_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose first save failed and that is saved again with its
    new score supersedes nothing but itself.
    """
    real, fails = ckpt.write, iter([False, True])

    def once(folder: Path, *args: Any) -> None:
        if next(fails, False):
            raise OSError("No space left on device")
        real(folder, *args)

    monkeypatch.setattr("trainkit.checkpoint.store.write", once)
    keeper = ModelCheckpoint(
        monitor="val/loss", save_top_k=2, every_n_train_steps=2, every_n_epochs=None
    )
    quiet(tmp_path, max_epochs=2, callbacks=keeper).fit(Line(), loader(8), loader(4))
    assert [name.rpartition("=")[2] for name in kept(tmp_path / "checkpoints")] == ["2", "4"]


def test_another_runs_checkpoints_in_a_shared_folder_are_not_touched(tmp_path: Path) -> None:
    """A run from the start in a dirpath that holds checkpoints is refused;
    going on with them is not.
    """
    place = str(tmp_path / "shared")
    quiet(tmp_path / "one", callbacks=ModelCheckpoint(dirpath=place)).fit(Line(), loader(8))
    before = kept(Path(place))
    with pytest.raises(
        ConfigError,
        match=r"dirpath is '.*shared', which holds checkpoints of another run \(epoch=0-step=2\)",
    ):
        quiet(tmp_path / "two", callbacks=ModelCheckpoint(dirpath=place)).fit(Line(), loader(8))
    assert kept(Path(place)) == before
    quiet(tmp_path / "two", max_epochs=2, callbacks=ModelCheckpoint(dirpath=place)).fit(
        Line(), loader(8), ckpt_path="auto"
    )


def test_a_run_that_begins_at_another_runs_checkpoint_has_one_of_its_own(tmp_path: Path) -> None:
    """Resumed from another run's folder, and ended at once,
    a run leaves a checkpoint in its own.
    """
    quiet(tmp_path / "one", callbacks=ModelCheckpoint()).fit(Line(), loader(8))
    last = str(tmp_path / "one" / "checkpoints" / "last")
    quiet(tmp_path / "two", callbacks=ModelCheckpoint()).fit(Line(), loader(8), ckpt_path=last)
    assert ckpt.verify(tmp_path / "two" / "checkpoints" / "last")["global_step"] == 2


def test_best_is_what_was_validated(tmp_path: Path) -> None:
    """A checkpoint inside an epoch gets the score of its own weights;
    one that was not validated is never best.
    """

    class ByStep(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", float(self.trainer.global_step % 3))

    keeper = ModelCheckpoint(
        monitor="val/loss",
        save_top_k=-1,
        every_n_train_steps=1,
        every_n_epochs=1,
        filename="step={step}",
    )
    quiet(tmp_path, callbacks=keeper, val_check_interval=2).fit(ByStep(), loader(16), loader(16))
    # step 4: 4 % 3; step 2 has 2.0, and 1 and 3 were not validated
    assert keeper.best_model_score == 1.0
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step=4"


def test_a_second_fit_leaves_the_first_runs_checkpoints(tmp_path: Path) -> None:
    """The same Trainer trains again: the earlier run's files move aside and none is deleted."""
    trainer = quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(Line(), loader(8))
    trainer.fit(Line(), loader(8))
    (before,) = tmp_path.glob("before-*")
    assert (before / "checkpoints" / "last" / MANIFEST).is_file()
    assert (tmp_path / "checkpoints" / "last" / MANIFEST).is_file()


def test_two_checkpoint_callbacks_in_one_folder_are_refused(tmp_path: Path) -> None:
    """They would delete each other's."""
    with pytest.raises(ConfigError, match="Two ModelCheckpoints write to"):
        quiet(tmp_path, callbacks=[ModelCheckpoint(), ModelCheckpoint()]).fit(Line(), loader(8))


@pytest.mark.parametrize("filename", ["..", ".", "last", "best", ".hidden", ""])
def test_a_checkpoints_name_cannot_lead_elsewhere(filename: str, tmp_path: Path) -> None:
    """A filename that is no folder of its own is refused, and nothing is deleted."""
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="must name a folder of its own"):
        quiet(tmp_path, callbacks=ModelCheckpoint(filename=filename)).fit(Line(), loader(8))
    assert (tmp_path / "precious").is_file()


@pytest.mark.parametrize("monitor", [None, "val/score"])
def test_weights_that_are_not_finite_are_never_best(
    monitor: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the monitored value is finite, and the newest otherwise best,
    `best` stays with the last finite weights.
    """

    class Breaks(Scored):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch > 0:
                with torch.no_grad():
                    self.model.weight[0, 0] = math.nan  # type: ignore[index, operator]

    keeper = ModelCheckpoint(monitor=monitor, mode="max", save_top_k=1)
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0}
    quiet(tmp_path, callbacks=keeper, **settings).fit(Breaks([0.1, 0.5, 0.9]), loader(8), loader(4))
    folder = tmp_path / "checkpoints"
    assert (target(folder, "best"), target(folder, "last")) == ("epoch=0-step=2", "epoch=2-step=6")
    assert Path(keeper.best_model_path).name == "epoch=0-step=2"
    assert capsys.readouterr().out.count("are not finite, so it is not taken for the best one") == 1


def test_arguments_are_given_by_name() -> None:
    """By place Lightning's first is `dirpath`."""
    with pytest.raises(ConfigError, match="positional"):
        ModelCheckpoint("checkpoints")  # type: ignore[misc]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_score_that_is_not_finite_is_never_best(value: float, tmp_path: Path) -> None:
    """An infinite score is no best one, in either mode."""
    for mode in ("min", "max"):
        folder = run(tmp_path / mode, ModelCheckpoint(monitor="val/score", mode=mode), [0.5, value])  # type: ignore[arg-type]
        assert target(folder, "best") == "epoch=0-step=2"


def test_without_finite_weights_there_is_no_best(tmp_path: Path) -> None:
    """If no checkpoint is fit, there is none to choose."""

    class Broken(Line):
        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                self.model.weight.fill_(math.nan)  # type: ignore[operator]

    keeper = ModelCheckpoint()
    quiet(tmp_path, callbacks=keeper).fit(Broken(), loader(8))
    assert keeper.best_model_path == ""
    assert not (tmp_path / "checkpoints" / "best").exists()
    assert target(tmp_path / "checkpoints", "last")


@pytest.mark.parametrize(
    "filename", ["../x", "/tmp/x", "a/../../x", "s3://b/x", "a\x1b[31m", "best", "last"]
)
def test_a_filename_that_leads_elsewhere_is_refused_before_training(filename: str) -> None:
    """When the callback is made."""
    with pytest.raises(ConfigError, match="it must name a folder of its own"):
        ModelCheckpoint(filename=filename)
