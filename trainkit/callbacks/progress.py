"""Progress on rank 0: a live bar on a terminal, plain lines elsewhere (under horovodrun, in a file), a line per epoch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainkit.callback import Callback
from trainkit.terminal import console_of

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer

# Where there is no terminal a line of progress comes this often, so that a long epoch is seen to live.
_PLAIN_EVERY_S = 30.0


class ProgressBar(Callback):
    """Shows how far training and validation are.

    The live bar is drawn by a thread of rich's; a step only moves a counter. Values logged with `prog_bar=True` are read
    each `log_every_n_steps`, with the others.
    """

    def __init__(self) -> None:
        self._console = console_of()
        self._bar: Progress | None = None
        self._shown: dict[str, float] = {}
        self._task: TaskID | None = None

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Start the bar."""
        self._main = trainer.is_global_zero
        if self._main and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        """Begin an epoch."""
        self._began = self._printed = self._last = time.monotonic()
        self._first_step, self._first_sample = trainer.state.step_in_epoch, trainer.state.samples_seen
        if self._bar is not None:
            self._task = self._bar.add_task(
                _epoch_name(trainer),
                total=trainer.session.num_training_steps,
                completed=self._first_step,
                rate="",
                values="",
            )

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Move on by one."""
        self._last = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
        elif self._main and self._last - self._printed >= _PLAIN_EVERY_S:
            self._printed = self._last
            of = f"/{trainer.session.num_training_steps}" if trainer.session.num_training_steps else ""
            place = f"{_epoch_name(trainer)}  step {trainer.state.step_in_epoch}{of}"
            self._console.print(f"{place}  {self._rate(trainer)}{self._values()}")

    def on_metrics(self, trainer: Trainer, task: Task, metrics: dict[str, float], step: int) -> None:
        """Show the values that were logged for the bar."""
        self._shown |= {n: v for n, v in metrics.items() if n in trainer.session.prog_bar_names}
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, values=self._values().strip(), rate=self._rate(trainer))

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Say that validation runs."""
        if self._bar is not None and self._task is not None and batch_idx == 0:
            self._bar.update(self._task, rate="validating")

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Print the epoch's line: its values, its rate, its time."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._main:
            values = {n: v for n, v in trainer.callback_metrics.items() if "dataloader_idx" not in n}
            text = "".join(f"  {name} {value:.4g}" for name, value in values.items())
            self._console.print(f"{_epoch_name(trainer)}{text}  {self._rate(trainer)}  {time.monotonic() - self._began:.1f} s")

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """Take the bar away and say why training ended, where it was stopped."""
        self._stop()
        if self._main and trainer.state.stop_reason:
            self._console.print(f"Stopped: {trainer.state.stop_reason}.")

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        """Take the bar away, so that the error can be read."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _rate(self, trainer: Trainer) -> str:
        seconds = self._last - self._began  # of training alone, without validation
        return f"{(trainer.state.samples_seen - self._first_sample) / max(seconds, 1e-9):,.0f} samples/s"

    def _values(self) -> str:
        return "".join(f"  {name} {value:.4g}" for name, value in self._shown.items())


def _epoch_name(trainer: Trainer) -> str:
    of = f"/{trainer.max_epochs}" if trainer.max_epochs else ""
    return f"epoch {trainer.current_epoch + 1}{of}"
