"""Interrupted runs, and a comparison of the resumed run with an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.extensions.check_resume.compare import differences


class BrokenOffError(Exception):
    """The error that interrupts a run."""


class BreaksOff(Callback):
    """Fails after a number of steps: at the next step's beginning, or in the next validation."""

    def __init__(self, after: int, hook: str = "step") -> None:
        self.after, self.hook = after, hook

    def reached(self, trainer: RunView) -> None:
        """Fail."""
        raise BrokenOffError

    def _look(self, trainer: RunView, hook: str) -> None:
        if (trainer.global_step, hook) == (self.after, self.hook) and not trainer.sanity_checking:
            self.reached(trainer)

    def on_train_step_start(self, trainer: RunView, task: Any) -> None:
        """Fail here,"""
        self._look(trainer, "step")

    def on_validation_batch_start(self, trainer: RunView, task: Any, *_: Any) -> None:
        """or here."""
        self._look(trainer, "validation")


def newest(run_dir: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return (run_dir / "checkpoints" / "last").resolve()


def assert_same_run(one: Path, other: Path) -> None:
    """The newest checkpoints are equal bit for bit, metrics included,
    and so are the logged values.
    """
    assert differences(newest(one), newest(other)) == []
    assert (one / "metrics.csv").read_text() == (other / "metrics.csv").read_text()
