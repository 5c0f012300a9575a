"""ModelCheckpoint: when a checkpoint is written, which are kept, and what `last` and `best` point to."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint import format as ckpt
from trainkit.errors import ConfigError


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
    quiet(tmp_path, callbacks=keeper, **(known | settings)).fit(Scored(scores), loader(8), loader(4))
    return tmp_path / "checkpoints"


def kept(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are there."""
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def target(folder: Path, link: str) -> str:
    """Return the name of the checkpoint that a link points to, which must be whole."""
    ckpt.verify(folder / link)
    return (folder / link).resolve().name


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
        ("min", -1, ["epoch=0-step=2", "epoch=1-step=4", "epoch=2-step=6", "epoch=3-step=8"], "epoch=1-step=4"),
    ],
)
def test_the_best_and_the_last_are_kept(tmp_path: Path, mode: Any, top: int, names: list[str], best: str) -> None:
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
        ({"every_n_epochs": None}, ["epoch=3-step=6"]),
        ({"every_n_train_steps": 1}, [f"epoch={(s - 1) // 2}-step={s}" for s in range(1, 7)]),
    ],
)
def test_checkpoints_come_when_asked_for(tmp_path: Path, every: dict[str, Any], names: list[str]) -> None:
    """Checkpoints are written each n epochs, each n steps, and at the end of training, each step once."""
    assert kept(run(tmp_path, ModelCheckpoint(save_top_k=-1, **every), [0, 0, 0])) == names


def test_a_step_at_an_epochs_end_is_scored_by_its_own_validation(tmp_path: Path) -> None:
    """Where steps and epochs ask for the same step, its score is that of the validation after it."""
    keeper = ModelCheckpoint(monitor="val/score", every_n_train_steps=2)
    folder = run(tmp_path, keeper, [3.0, 1.0, 2.0])
    assert target(folder, "best") == "epoch=1-step=4"
    assert kept(folder) == ["epoch=1-step=4", "epoch=2-step=6"]
    assert ckpt.verify(folder / "best")["metrics"]["val/score"] == 1.0


def test_before_the_first_validation_a_checkpoint_ranks_last(tmp_path: Path) -> None:
    """A checkpoint inside the first epoch has no score yet; it is written, and any scored one is better."""
    keeper = ModelCheckpoint(monitor="val/score", every_n_train_steps=1, save_top_k=2)
    folder = run(tmp_path, keeper, [7.0, 8.0])
    assert target(folder, "best") == "epoch=0-step=2"


def test_a_monitor_that_was_not_logged_is_named(tmp_path: Path) -> None:
    """A value that nobody logs is an error that lists those that there are."""
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\.monitor is 'val/los', .* not logged; there are val/score\."):
        run(tmp_path, ModelCheckpoint(monitor="val/los"), [1.0])


def test_names_hold_logged_values(tmp_path: Path) -> None:
    """Names of logged values are filled in, with "/" as "_"; unknown ones are refused."""
    folder = run(tmp_path, ModelCheckpoint(filename="e{epoch:02d}-{val_score:.1f}"), [1.25])
    assert kept(folder) == ["e00-1.2"]
    with pytest.raises(ConfigError, match=r"filename is '\{acc\}', but 'acc' is not known; there are epoch, step, val_score"):
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
    assert sorted(p.name for p in (folder / "last").iterdir()) == ["manifest.json", "weights.safetensors"]


def test_a_failed_write_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the disk takes no more, the older checkpoints and the links stay, it is told, and training goes on."""
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
    told = capsys.readouterr().out
    assert told.count("was NOT written: No space left on device. Training goes on.") == 2
    assert re.search(r"Checkpoints that were NOT written: \S+step=4, \S+step=6\.", told)


def test_one_callback_serves_two_runs(tmp_path: Path) -> None:
    """A callback that was used before saves a second run of the same length too."""
    keeper = ModelCheckpoint()
    for name in ("first", "second"):
        assert kept(run(tmp_path / name, keeper, [0])) == ["epoch=0-step=2"]


@pytest.mark.parametrize("wish", [{"save_top_k": 0, "save_last": False}, {"save_top_k": -2}])
def test_keeping_none_is_refused(wish: dict[str, Any]) -> None:
    """save_top_k is 1 or more, or -1, or 0 beside the last."""
    with pytest.raises(ConfigError, match=rf"save_top_k is {wish['save_top_k']}; it must be 1 or more, -1 to keep all, or 0"):
        ModelCheckpoint(**wish)
