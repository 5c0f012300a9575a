"""Goodput: the ledger adds up, and continues over restarts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader
from trainkit.callbacks import FaultInjection, Goodput, ModelCheckpoint
from trainkit.callbacks.goodput import PARTS, Ledger
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer

STEP_S, VALIDATION_S, DATA_S = 0.01, 0.03, 0.004


class Slow(Line):
    """A task with slow parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Take a while."""
        time.sleep(STEP_S)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Take a while."""
        time.sleep(VALIDATION_S)
        super().validation_step(batch, batch_idx)


class SlowRows(list[Any]):
    """Batches that arrive slowly."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(DATA_S)
            yield batch


def fit(tmp_path: Path, *faults: dict[str, Any]) -> dict[str, Any]:
    """Fit two epochs of six steps; return the ledger, also if a fault ended the fit."""
    trainer = Trainer(
        max_epochs=2,
        run_dir=str(tmp_path),
        callbacks=[FaultInjection(list(faults)), Goodput(), ModelCheckpoint(every_n_train_steps=4)],
        logger=[CSVLogger()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Slow(), SlowRows(loader()), loader(8), ckpt_path="auto")
    except RuntimeError:
        assert faults
    ledger: dict[str, Any] = json.loads((tmp_path / "goodput.json").read_text())
    return ledger


def test_what_takes_time_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, data, validation and saving each get their time, and the sum is the run's duration."""
    begun = time.perf_counter()
    ledger = fit(tmp_path)
    elapsed = time.perf_counter() - begun
    seconds = ledger["seconds"]
    assert set(seconds) == set(PARTS)
    assert 12 * STEP_S <= seconds["steps"] < 12 * STEP_S + 0.5 * elapsed
    assert 12 * DATA_S <= seconds["data"] < seconds["steps"]
    assert seconds["validating"] >= 4 * VALIDATION_S
    assert seconds["saving"] > 0
    assert seconds["repeating"] == seconds["recovering"] == 0
    assert sum(seconds.values()) <= elapsed
    assert ledger["goodput"] == pytest.approx(seconds["steps"] / sum(seconds.values()))
    assert (ledger["furthest_step"], ledger["ranks"]) == (12, [[0, 1]])
    assert "goodput" in capsys.readouterr().out
    assert "goodput" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_steps_that_were_lost_do_not_count_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that fails after step 7 and resumes from the checkpoint of step 6 repeats the steps since."""
    first = fit(tmp_path, {"do": "raise", "step": 7})
    time.sleep(0.2)
    second = fit(tmp_path)
    assert (first["furthest_step"], second["furthest_step"]) == (7, 12)
    assert second["seconds"]["repeating"] >= STEP_S  # step 7 itself
    assert second["seconds"]["steps"] >= first["seconds"]["steps"] + 5 * STEP_S
    assert second["seconds"]["down"] >= 0.2
    assert [step for step, _ in second["ranks"]] == [0, 6]
    assert "1 restart or change of ranks" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path: Path) -> None:
    """A ledger that cannot be written does not end the run."""
    (tmp_path / "goodput.json").write_text('{"seconds": 3')
    assert Ledger(tmp_path / "goodput.json").seconds == dict.fromkeys(PARTS, 0.0)
