"""Logger: what CSV, TensorBoard and W&B have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer


class Logger(Callback):
    """Opens on rank 0 when a fit starts, is handed numbers, and is closed whatever the end."""

    _open = False

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Open, and write the run's settings."""
        if trainer.is_global_zero:
            self.open(trainer)
            self._open = True
            self.log_hyperparams(trainer.session.hyperparams)

    def on_metrics(self, trainer: Trainer, task: Task, metrics: dict[str, float], step: int) -> None:
        """Write numbers."""
        if self._open:
            self.log_metrics(metrics, step, trainer.current_epoch)

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Close as failed."""
        self._finish("failed")

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Close as done."""
        self._finish("success")

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Close what a signal ended."""
        if stage == "fit":
            self._finish("preempted")

    def _finish(self, status: str) -> None:
        if self._open:
            self._open = False
            self.finalize(status)

    @abstractmethod
    def open(self, trainer: Trainer) -> None:
        """Open the files."""

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write numbers of a step."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the run's settings: flat names, plain values."""

    @abstractmethod
    def finalize(self, status: str) -> None:
        """Close; `status` is "success", "failed" or "preempted"."""
