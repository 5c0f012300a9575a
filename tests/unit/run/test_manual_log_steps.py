"""Manual optimization: the log steps are those of the batches, over epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.by_hand import Pair, Seldom
from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import LearningRateMonitor, ModelCheckpoint, SpikeDetection


class Logs(Callback):
    """Logs a value in each step's last hook."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Log."""
        task.log("hook", 1.0)


class Logging(Pair):
    """Logs a value in each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update and log."""
        super().training_step(batch, batch_idx)
        self.log("task", 1.0)


def fit(run_dir: Path, max_epochs: int, *more: Callback, ckpt_path: str | None = None) -> Written:
    """Train epochs of three batches, of two updates each; return the values of each fourth."""
    written = Written("task", "hook", "lr-")
    own = [LearningRateMonitor(logging_interval="step"), Logs(), written]
    trainer = quiet(
        run_dir,
        callbacks=[*own, *more],
        log_every_n_steps=4,
        max_epochs=max_epochs,
        enable_checkpointing=bool(more),
    )
    trainer.fit(Logging(), loader(12), ckpt_path=ckpt_path)
    return written


def steps_of(written: Written, name: str) -> list[int]:
    """Return the steps at which a value was logged."""
    return [step for step, values in written.rows if name in values]


@pytest.mark.parametrize("name", ["task", "hook", "lr-SGD"])
def test_batches_are_counted_over_epochs(tmp_path: Path, name: str) -> None:
    """Values of the Task, of hooks and of monitors are logged at each n-th batch of the run: in an
    epoch that is shorter than n too.
    """
    assert steps_of(fit(tmp_path, 4), name) == [8, 16, 24]


def test_rates_are_those_of_the_log_step(tmp_path: Path) -> None:
    """A batch that makes no update has rates too: those of its beginning."""
    monitor, written = LearningRateMonitor(logging_interval="step"), Written("lr-")
    trainer = quiet(tmp_path, callbacks=[monitor, written], log_every_n_steps=3)
    trainer.fit(Seldom(), loader(48))
    assert [step for step, _ in written.rows] == [0, 1, 2, 3]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    """The number of batches is saved: the fourth one is the second epoch's first."""
    fit(tmp_path, 1, ModelCheckpoint())
    written = fit(tmp_path, 4, ModelCheckpoint(), ckpt_path="auto")
    assert steps_of(written, "task") == [8, 16, 24]


def test_a_spike_stops_a_run_of_short_epochs(tmp_path: Path) -> None:
    """All ranks exchange what they found at the next log step, which may be of a later epoch."""
    spikes = SpikeDetection(stop=True, window=8, warmup=2, deviations=None)
    trainer = quiet(tmp_path, callbacks=[spikes], log_every_n_steps=5, max_epochs=4)
    trainer.fit(Pair([1.0, 1.1, 0.9, 1.0, 1.0, 9.0, *[1.0] * 10]), loader(16))
    assert [step for step, _, _ in spikes.spikes] == [10]
    assert trainer.global_step == 20


def test_a_step_of_one_update_is_counted_as_before(tmp_path: Path) -> None:
    """Under automatic optimization both counters are the same, in a resumed run too."""
    for epochs in (1, 3):
        trainer = quiet(tmp_path, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(Line(), loader(16), ckpt_path="auto")
        assert trainer.state.loop_steps == trainer.global_step == 4 * epochs
