"""ProgressBar: progress of epochs, validations, tests and predictions on rank 0,
and a row for each epoch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Collection
from typing import Any

from rich.console import Console

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked
from trainkit.callbacks.progress.displays import Bars, Lines, Screen
from trainkit.callbacks.progress.launched import LaunchedBar
from trainkit.console import console_of
from trainkit.errors import clause
from trainkit.launch.terminal import terminal_of_launcher
from trainkit.metrics.latest import plain_name


@checked
class ProgressBar(Callback):
    """Shows progress: a live bar on a terminal and in a notebook (with ipywidgets), lines
    elsewhere.

    A terminal is also that in which horovodrun was started, if all its ranks are on this host.

    Values logged with `prog_bar=True` appear beside the bar, as of the last `log_every_n_steps`.
    The rate is in samples, or in tokens if the Task has `tokens_per_sample`.

    Args:
        metrics: names of the values shown beside the bar and for an epoch. Default: beside the bar
            those logged with `prog_bar=True`, for an epoch all.
        refresh_rate: redraws per second.
    """

    config_key = "callbacks.progress"
    role = "progress_bar"
    may_differ = True

    def __init__(self, metrics: list[str] | None = None, refresh_rate: PositiveFloat = 4.0) -> None:
        self.metrics = metrics
        self.refresh_rate = refresh_rate
        self._screen: Screen | None = None
        self._shown: dict[str, float] = {}

    def _open(self, trainer: RunView) -> None:
        if trainer.is_global_zero:
            self._screen = make_screen(console_of(), self.refresh_rate)

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        self._shown = {}
        self._open(trainer)

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        self._began = self._last = time.monotonic()
        self._first_sample = trainer.state.samples_seen
        if self._screen is not None:
            done = trainer.state.step_in_epoch
            total = trainer.train_feed.num_steps_in(trainer.current_epoch)
            if trainer.max_steps != -1:  # training may end within the epoch
                left = done + trainer.max_steps - trainer.global_step
                total = left if total is None else min(total, left)
            self._screen.begin(f"{_epoch_name(trainer)}  step", total, done)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if self._screen is not None:
            self._last = time.monotonic()
            shown = [
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in self.get_metrics(trainer, task).items()
            ]
            self._screen.moved(trainer.state.step_in_epoch, self._rate(trainer), shown)

    def get_metrics(self, trainer: RunView, task: Task) -> dict[str, Any]:
        """Return the values beside the bar, by name. Override it to show others, as with Lightning's
        ProgressBar.
        """
        return dict(self._shown)

    def on_metrics(
        self, trainer: RunView, task: Task, metrics: dict[str, float], step: int
    ) -> None:
        names = trainer.evaluator.prog_bar_names if self.metrics is None else self.metrics
        self._shown |= {name: value for name, value in metrics.items() if name in names}

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        if self._screen is None:
            return
        self._screen.end()
        values = self._chosen(trainer, trainer.callback_metrics)
        self._screen.epoch(
            _epoch_name(trainer), values, self._rate(trainer), time.monotonic() - self._began
        )

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Close the screen, and print the reason if training was stopped."""
        if self._screen is not None and trainer.state.stop_reason:
            self._screen.say(f"Stopped: {clause(trainer.state.stop_reason)}.")
        self._close()

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        self._begin_evaluation(trainer, "validating")

    def on_validation_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if self._screen is not None:
            self._batches += 1
            self._screen.moved(self._batches, "", ())

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        """End it; if it was within an epoch, print its values,
        which no epoch's row will contain.
        """
        self._end_evaluation()
        state = trainer.state
        within = state.step_open or not state.epoch_done
        # then SWA validates its average
        over = 0 <= trainer.max_epochs <= state.current_epoch
        if self._screen is not None and state.phase == "fit" and within and not over:
            values = self._chosen(trainer, trainer.evaluator.names)
            text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._screen.say(f"{_epoch_name(trainer)}  step {state.step_in_epoch}  {text}")

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        self._begin_evaluation(trainer, "testing")

    def on_predict_start(self, trainer: RunView, task: Task) -> None:
        self._begin_evaluation(trainer, "predicting")

    def _begin_evaluation(self, trainer: RunView, name: str) -> None:
        if trainer.state.phase != "fit" and not trainer.sanity_checking:
            self._open(trainer)
        if self._screen is not None:
            self._batches = 0
            self._screen.begin(name, trainer.evaluator.num_batches)

    def _end_evaluation(self, *_: Any, **__: Any) -> None:
        if self._screen is not None:
            self._screen.end()

    on_test_end = on_predict_end = _end_evaluation

    def _close(self, *_: Any, **__: Any) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    on_exception = teardown = _close  # an error is readable, and a signal leaves no bar behind

    def _chosen(self, trainer: RunView, names: Collection[str]) -> dict[str, float]:
        """Return the values of these names;
        without `metrics` those of the first loader, each under one of its two names.
        """

        def is_chosen(name: str) -> bool:
            if self.metrics is not None:
                return name in self.metrics
            return "dataloader_idx" not in name and (
                name == (plain := plain_name(name)) or plain not in names
            )

        return {
            name: value
            for name, value in trainer.callback_metrics.items()
            if name in names and is_chosen(name)
        }

    def _rate(self, trainer: RunView) -> str:
        seconds = self._last - self._began  # training only, without validation
        rate = (trainer.state.samples_seen - self._first_sample) / max(seconds, 1e-9)
        tokens = getattr(trainer.task, "tokens_per_sample", None)
        return f"{rate:,.0f} samples/s" if tokens is None else f"{rate * tokens:,.0f} tokens/s"


def make_screen(console: Console, refresh_rate: float) -> Screen:
    """Return the display for a console: a bar on it or on the launcher's terminal, or lines."""
    widgets = importlib.util.find_spec("ipywidgets") is not None
    if console.is_terminal and not console.is_dumb_terminal and (widgets or not console.is_jupyter):
        return Bars(console, refresh_rate)
    terminal = None if console.is_terminal or console.is_jupyter else terminal_of_launcher()
    return Lines(console) if terminal is None else LaunchedBar(terminal, refresh_rate)


def _epoch_name(trainer: RunView) -> str:
    of = f"/{trainer.max_epochs}" if trainer.max_epochs > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{of}"
