"""Weights & Biases, offline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.loggers import WandbLogger


def test_offline_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With WANDB_MODE=offline a run leaves its own file, with its numbers, below the run's folder."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    task = Line()
    task.hparams["width"] = 7654
    quiet(tmp_path, logger=WandbLogger(project="toys", tags=["tiny"]), log_every_n_steps=1).fit(task, loader(8), loader(4))
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert all(text in content for text in (b"train/loss", b"val/loss", b"7654", b"toys", b"tiny", tmp_path.name.encode()))


class Fake:
    """Stands for the module wandb: keeps what it is told."""

    id = "run7"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def init(self, **options: Any) -> Any:
        """Start a run."""
        self.told.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Take numbers."""
        self.told.append((step, sorted(metrics)))

    def finish(self, exit_code: int) -> None:
        """End."""
        self.told.append(exit_code)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_named_logged_and_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The run is called like its folder unless it has a name, and a failed one is marked as such."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    class Fails(Line):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise KeyError("broken")

    trainer = quiet(tmp_path / "mine", logger=WandbLogger(group="g"), log_every_n_steps=1)
    try:
        trainer.fit(Fails(), loader(8))
    except KeyError:
        assert fails
    options, *logged, exit_code = fake.told
    assert (options["project"], options["name"], options["group"], options["dir"]) == (
        "trainkit",
        "mine",
        "g",
        str(tmp_path / "mine"),
    )
    assert logged == [(step, ["epoch", "lr", "step", "train/loss"]) for step in (1, 2)]
    assert exit_code == int(fails)


def test_without_wandb_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where wandb is not installed the message names the extra."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"WandbLogger needs wandb .*pip install 'trainkit\[wandb\]'"):
        quiet(tmp_path, logger=WandbLogger()).fit(Line(), loader(8))


def test_an_unknown_mode_is_refused() -> None:
    """The mode is one of W&B's own."""
    with pytest.raises(ConfigError, match=r"WandbLogger\.mode is 'off'; it must be one of 'online', 'offline', 'disabled'"):
        WandbLogger(mode="off")  # type: ignore[arg-type]


def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own checkpoint; a run that starts from another one's is a new run."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def start(folder: str, epochs: int, **options: Any) -> dict[str, Any]:
        fake.told.clear()
        save = {"enable_checkpointing": True, "callbacks": ModelCheckpoint()}
        trainer = quiet(tmp_path / folder, logger=WandbLogger(), **{"max_epochs": epochs} | save)
        trainer.fit(Line(), loader(8), loader(4), **options)
        told: dict[str, Any] = fake.told[0]
        return told

    assert start("a", 1)["id"] is None
    assert start("a", 2, ckpt_path="last")["id"] == "run7"
    assert start("b", 3, ckpt_path=str(tmp_path / "a" / "checkpoints" / "last"))["id"] is None
