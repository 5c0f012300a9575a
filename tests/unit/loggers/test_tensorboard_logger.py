"""TensorBoard: what its own reader finds in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import TensorBoardLogger


def train(folder: Path, ckpt_path: str | None = None, **settings: Any) -> EventAccumulator:
    """Train epochs of two steps and return a reader of what was written."""
    known: dict[str, Any] = {"logger": TensorBoardLogger(), "log_every_n_steps": 1, "enable_checkpointing": True}
    task = Line()
    task.hparams["width"] = 7
    quiet(folder, **(known | settings)).fit(task, loader(8), loader(4), ckpt_path=ckpt_path)
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return reader


def test_scalars_and_settings_are_written(tmp_path: Path) -> None:
    """Each value is a scalar at its step; the settings are a text."""
    reader = train(tmp_path, max_epochs=2)
    assert set(reader.Tags()["scalars"]) == {"train/loss", "lr", "val/loss"}
    assert [(e.step, e.value) for e in reader.Scalars("lr")] == [(step, pytest.approx(0.1)) for step in (1, 2, 3, 4)]
    assert [e.step for e in reader.Scalars("val/loss")] == [2, 4]
    (text,) = reader.Tensors("config/text_summary")
    assert b'"width": 7' in text.tensor_proto.string_val[0]


def test_what_is_trained_anew_is_shown_once(tmp_path: Path) -> None:
    """Going on from an older checkpoint hides what the run had logged behind it."""
    train(tmp_path, max_epochs=3, callbacks=ModelCheckpoint(save_top_k=-1))
    reader = train(tmp_path, max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / "epoch=0-step=2"))
    assert [e.step for e in reader.Scalars("lr")] == [1, 2, 3, 4]


def test_a_failed_run_is_closed(tmp_path: Path) -> None:
    """What was logged before an error is on disk after it."""

    class Fails(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 1:
                raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        quiet(tmp_path, logger=TensorBoardLogger(), log_every_n_steps=1).fit(Fails(), loader(8))
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [e.step for e in reader.Scalars("lr")] == [1]
