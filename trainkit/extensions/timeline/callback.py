"""Timeline: records some steps of all ranks, with Horovod's and torch's activity in them, for a
trace viewer.

on_train_step_start   begin, if due or requested: profiler, Horovod's timeline, barriers that align clocks
hooks of a step       mark the end of each part
on_train_step_start   write the previous step; after the last one: end
on_fit_end            rank 0 merges all files into one
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.console import short
from trainkit.errors import ConfigError
from trainkit.extensions.profilers.callbacks import PyTorchProfiler
from trainkit.extensions.timeline.recording import Recording
from trainkit.extensions.timeline.traces.merge import TraceError, recordings, write_whole
from trainkit.extensions.timeline.traces.pieces import FOLDER, PATIENCE_S, REQUEST, WHOLE

if TYPE_CHECKING:
    from types import FrameType

    from trainkit.api.task import Task

_LOOK_EVERY_S = 0.3


@checked
class Timeline(Callback):
    """Records `num_steps` steps from `start_step` on into `<run_dir>/timeline/steps-A-B/`, one file
    per rank.

    A running job records on request: `python -m trainkit timeline RUN_DIR record=10`, or SIGUSR2 to
    any rank's process, from its set-up to its end (before and after, that signal ends a process).
    All ranks begin at the same step. Outside of a recording a step costs one comparison.

    A recording contains each rank's parts of a step, each gradient's path through its reduction,
    Horovod's own timeline of each rank (needs the Horovod of `trainkit horovod install`), and the
    operators of torch's profiler, which slows these steps down; disable it to see the steps' own
    times. Clocks of several hosts are aligned by barriers, with a bound on the error.

    Args:
        start_step: the first step, as `global_step` counts, from 0. null: only on request.
        num_steps: number of steps.
        torch_profiler: run torch.profiler too: operators on the CPU, kernels on a GPU.
    """

    config_key = "callbacks.timeline"
    runs_first = True

    def __init__(
        self,
        start_step: NonNegativeInt | None = 20,
        num_steps: PositiveInt = 10,
        torch_profiler: bool = True,
    ) -> None:
        self.start_step = start_step
        self.num_steps = num_steps
        self.torch_profiler = torch_profiler
        self.folders: list[Path] = []
        self._recording: Recording | None = None
        self._due = False
        self._looked = 0.0
        self._before: Any = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Handle the signal from now on: before that it would end the process."""
        if stage == "fit":
            self._request = trainer.run_dir / FOLDER / REQUEST
            with contextlib.suppress(ValueError):  # only the main thread may set a handler
                self._before = signal.signal(signal.SIGUSR2, self._on_signal)

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Handle requests from now on."""
        with contextlib.suppress(OSError):  # a request whose command has given up
            if time.time() - self._request.stat().st_mtime > PATIENCE_S:
                self._request.unlink()
        self._due = self.start_step is not None and trainer.global_step <= self.start_step
        self.folders = []
        self._agreement = trainer.coordinator.register("recording", self._is_requested)
        self._uses_torch_profiler = self.torch_profiler
        if self.torch_profiler and any(isinstance(c, PyTorchProfiler) for c in trainer.callbacks):
            # torch can run one at a time; a second one may end the process
            self._uses_torch_profiler = False
            trainer.say("Timeline: no operators: trainer.profiler=pytorch uses torch's profiler.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            self._request.parent.mkdir(parents=True, exist_ok=True)
            self._request.touch()

    def _is_requested(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return False
        self._looked = now
        return self._recording is None and self._request.exists()

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.end_step()
            if trainer.global_step >= self._until:
                self._finish(trainer)
        if self._due and trainer.global_step == self.start_step:
            self._due = False
            self._begin(trainer, self.num_steps)
        elif self._agreement.agreed:
            self._agreement.agreed = False
            if self._recording is None:
                self._begin(trainer, trainer.engine.comm.run_on_main(self._take_request))
        if self._recording is not None:
            self._recording.begin_step()

    def _take_request(self) -> int:
        try:
            requested = self._request.read_text().strip()
            self._request.unlink(missing_ok=True)
        except OSError:
            requested = ""
        return int(requested) if requested.isdecimal() and int(requested) else self.num_steps

    def _begin(self, trainer: RunView, steps: int) -> None:
        first = trainer.global_step
        total = trainer.total_steps
        self._until = first + steps if total is None else max(first + 1, min(first + steps, total))
        folder = trainer.engine.comm.run_on_main(
            lambda: _new_folder(trainer.run_dir / FOLDER, first, self._until - 1)
        )
        self.folders.append(folder)
        trainer.say(f"Timeline: recording steps {first} to {self._until - 1}")
        self._recording = Recording(trainer, folder, self._uses_torch_profiler)

    def _finish(self, trainer: RunView) -> None:
        assert self._recording is not None
        is_written = self._recording.finish()
        self._recording = None
        if is_written:
            see = f"python -m trainkit timeline {short(trainer.run_dir)}"
            trainer.say(
                f"Timeline: recorded into {short(self.folders[-1])}. Print its report with: {see}"
            )

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is not None:
            self._recording.mark("data")

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        if self._recording is not None:
            self._recording.mark("forward")

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.mark("backward")

    def on_train_batch_end(
        self, trainer: RunView, task: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of the hooks, if another batch or the reduction follows."""
        if self._recording is not None and not self._recording.updated:
            self._recording.mark("hooks")

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.mark("optimizer")

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Mark the end of the reduction, with unscaling and clipping."""
        if self._recording is not None:
            self._recording.mark_sums()

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Exclude a validation within or after a step from its parts."""
        if self._recording is not None:
            # the epoch's values are gathered before it
            within = "hooks" if trainer.state.step_open else "epoch end"
            self._recording.mark("optimizer" if not self._recording.updated else within)

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.mark("validation")

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.mark("optimizer" if not self._recording.updated else "hooks")

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        if self._recording is not None:
            self._recording.end_step(is_last=True)
            self._finish(trainer)
        elif self._due and self.start_step is not None:
            trainer.say(
                "Timeline: nothing was recorded: callbacks.timeline.start_step is"
                f" {self.start_step}, and training ended at step {trainer.global_step}."
            )

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        if trainer.is_global_zero:
            for folder in recordings(trainer.run_dir):
                if (folder / WHOLE).exists():
                    continue
                try:
                    path = write_whole(folder)
                    trainer.say(
                        f"Timeline: {short(path)} opens in ui.perfetto.dev and chrome://tracing"
                    )
                except (TraceError, OSError) as error:
                    trainer.say(
                        f"Timeline: {short(folder)} could not be merged into one file: {error}"
                    )

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """End a recording that an error or a signal interrupted."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
            trainer.say(f"Timeline: the recording was aborted before step {trainer.global_step}.")
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)
            self._before = None


def _new_folder(place: Path, first: int, last: int) -> Path:
    """Create an empty folder for the recording;
    one of the same steps is left from an earlier attempt.
    """
    folder = place / f"steps-{first}-{last}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"Timeline cannot write {folder}: {error.strerror}. Leave callbacks=timeline out."
        ) from error
    return folder
