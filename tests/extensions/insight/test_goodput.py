"""Goodput: the ledger adds up, and continues over restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader
from trainkit.callbacks import FaultInjection, Goodput, ModelCheckpoint
from trainkit.extensions.insight.goodput import PARTS, Ledger
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer

STEP_S, VALIDATION_S, DATA_S, SAVING_S, SETUP_S = 8.0, 4.0, 2.0, 1.0, 0.5


class Clock:
    """Stands in for the module `time`, and moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.jump = 0.0

    def perf_counter(self) -> float:
        """The time of one process."""
        return self.now

    def monotonic(self) -> float:
        """The time that processes of a boot share."""
        return self.now

    def time(self) -> float:
        """The time of day."""
        return 1e9 + self.now + self.jump


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that Goodput reads."""
    clock = Clock()
    monkeypatch.setattr("trainkit.extensions.insight.goodput.time", clock)
    monkeypatch.setattr("trainkit.launch.moments.time", clock)
    return clock


class Slow(Line):
    """A task with slow parts."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.num_saves = clock, 0

    def on_fit_start(self) -> None:
        """Take a while."""
        self.clock.now += SETUP_S

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Take a while."""
        self.clock.now += STEP_S
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Take a while."""
        self.clock.now += VALIDATION_S
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take a while."""
        self.clock.now += SAVING_S
        self.num_saves += 1


class SlowRows(list[Any]):
    """Batches that arrive slowly."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(loader())
        self.clock = clock

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.clock.now += DATA_S
            yield batch


def fit(tmp_path: Path, task: Slow, *faults: dict[str, Any]) -> dict[str, Any]:
    """Fit two epochs of six steps; return the ledger, also if a fault ended the fit."""
    trainer = Trainer(
        max_epochs=2,
        run_dir=str(tmp_path),
        callbacks=[
            FaultInjection(list(faults)),
            Goodput(),
            ModelCheckpoint(every_n_train_steps=4, every_n_epochs=1),
        ],
        logger=[CSVLogger()],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(task, SlowRows(task.clock), loader(8), ckpt_path="auto")
    except RuntimeError:
        assert faults
    ledger: dict[str, Any] = json.loads((tmp_path / "goodput.json").read_text())
    return ledger


def test_what_takes_time_has_a_phase_of_its_own(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, data, validation and saving each get their time, and the sum is the run's duration."""
    begun, task = clock.now, Slow(clock)
    ledger = fit(tmp_path, task)
    seconds = ledger["seconds"]
    assert seconds == dict.fromkeys(PARTS, 0.0) | {
        "steps": 12 * STEP_S,
        "data": 12 * DATA_S,
        "validating": 4 * VALIDATION_S,
        "saving": task.num_saves * SAVING_S,
        "starting": SETUP_S,
    }
    assert sum(seconds.values()) == clock.now - begun
    assert ledger["goodput"] == pytest.approx(seconds["steps"] / sum(seconds.values()))
    assert (ledger["furthest_step"], ledger["ranks"]) == (12, [[0, 1]])
    assert "goodput" in capsys.readouterr().out
    assert "goodput" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_a_wait_for_the_next_steps_batch_is_for_data(tmp_path: Path, clock: Clock) -> None:
    """Where the engine fetches it within a step (data/early.py)."""

    class Waiting(Slow):
        def on_after_backward(self) -> None:
            """Wait between the backward pass and the sums."""
            self.clock.now += DATA_S
            self.trainer.train_feed.fetching.waited_ns += int(DATA_S * 1e9)

    seconds = fit(tmp_path, Waiting(clock))["seconds"]
    assert (seconds["steps"], seconds["data"]) == (12 * STEP_S, 12 * 2 * DATA_S)


@pytest.mark.parametrize("jump_s", [0, 3600, -3600])
def test_steps_that_were_lost_do_not_count_twice(
    jump_s: int, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails after step 7 and resumes from the checkpoint of step 6 repeats the steps
    since.

    It was down for as long as it was, also if the time of day was set to another one.
    """
    first = fit(tmp_path, Slow(clock), {"do": "raise", "step": 7})
    clock.now += 1000
    clock.jump = jump_s
    second = fit(tmp_path, Slow(clock))
    assert (first["furthest_step"], second["furthest_step"]) == (7, 12)
    assert second["seconds"]["repeating"] == STEP_S  # step 7 itself
    assert second["seconds"]["steps"] == first["seconds"]["steps"] + 5 * STEP_S
    assert second["seconds"]["down"] == 1000
    assert [step for step, _ in second["ranks"]] == [0, 6]
    assert "1 restart or change of ranks" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_begun_again(tmp_path: Path) -> None:
    """A ledger that cannot be written does not end the run."""
    (tmp_path / "goodput.json").write_text('{"seconds": 3')
    assert Ledger(tmp_path / "goodput.json").seconds == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize("is_same", [True, False])
def test_an_elastic_job_that_begins_again_keeps_its_ledger(
    is_same: bool, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers may be lost before the first checkpoint;
    another job's ledger is moved with that job's files.
    """
    monkeypatch.setenv("TRAINKIT_JOB_STARTED", "2026-01-01_00-00-00")
    first = fit(tmp_path, Slow(clock), {"do": "raise", "step": 2})
    clock.now += 100
    if not is_same:
        monkeypatch.setenv("TRAINKIT_JOB_STARTED", "2026-01-02_00-00-00")
    second = fit(tmp_path, Slow(clock))
    assert first["seconds"]["steps"] == 2 * STEP_S
    assert second["seconds"]["down"] == (100 if is_same else 0)
    assert second["seconds"]["repeating"] == (2 * STEP_S if is_same else 0)
