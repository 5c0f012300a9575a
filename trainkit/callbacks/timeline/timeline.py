"""Timeline: records some steps of all ranks, and what Horovod and torch did in them, for people to look at.

on_train_step_start   begin, where it is due or was asked for: profiler, Horovod's timeline, meetings that align clocks
hooks of a step       each notes the time and what ended there
on_train_step_start   the step before is written; after the last one: end
on_fit_end            rank 0 makes one file of all
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.api.callback import Callback
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.callbacks.profiler import PyTorchProfiler
from trainkit.callbacks.timeline.recording import Recording
from trainkit.console import short
from trainkit.errors import ConfigError
from trainkit.tracing.merge import TraceError, recordings, write_whole
from trainkit.tracing.pieces import FOLDER, PATIENCE_S, REQUEST, WHOLE

if TYPE_CHECKING:
    from types import FrameType

    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

_LOOK_EVERY_S = 0.3


@checked
class Timeline(Callback):
    """Records `num_steps` steps from `start_step` on into `<run_dir>/timeline/steps-A-B/`, a file for each rank.

    A running job records when it is asked: `python -m trainkit timeline RUN_DIR record=10`, or SIGUSR2 to any rank's
    process, from its set-up to its end (before and after, that signal ends a process). All ranks begin at the same step.
    Outside of a recording a step pays one comparison.

    While it records: each rank's parts of a step, each gradient's way through its sum, Horovod's own timeline of each rank
    (needs the Horovod of `trainkit horovod install`), and torch's profiler, which makes these steps slower; leave it out to
    see their own times. Clocks of several hosts are aligned by barriers, with a bound of the error.

    Args:
        start_step: the first step, as `global_step` counts, from 0. null: only when asked.
        num_steps: how many.
        torch_profiler: run torch.profiler too: operators on the CPU, kernels on a GPU.
    """

    config_key = "callbacks.timeline"

    def __init__(
        self, start_step: NonNegativeInt | None = 20, num_steps: PositiveInt = 10, torch_profiler: bool = True
    ) -> None:
        self.start_step, self.num_steps, self.torch_profiler = start_step, num_steps, torch_profiler
        self.folders: list[Path] = []
        self._recording: Recording | None = None
        self._due = False
        self._looked = 0.0
        self._before: Any = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Listen for the signal from now on: before that it would end the process."""
        if stage == "fit":
            self._request = trainer.run_dir / FOLDER / REQUEST
            with contextlib.suppress(ValueError):  # only the main thread may
                self._before = signal.signal(signal.SIGUSR2, self._on_signal)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Listen for requests."""
        with contextlib.suppress(OSError):  # one that is older than anybody waits for
            if time.time() - self._request.stat().st_mtime > PATIENCE_S:
                self._request.unlink()
        self._due = self.start_step is not None and trainer.global_step <= self.start_step
        self.folders = []
        trainer.session.pulse.wish = self._is_asked
        self._takes_torch = self.torch_profiler
        if self.torch_profiler and any(isinstance(c, PyTorchProfiler) for c in trainer.callbacks):
            self._takes_torch = False  # torch can run one at a time; a second one may end the process
            trainer.session.tell("Timeline: it leaves torch's profiler to trainer.profiler=pytorch.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            self._request.parent.mkdir(parents=True, exist_ok=True)
            self._request.touch()

    def _is_asked(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return False
        self._looked = now
        return self._recording is None and self._request.exists()

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """Begin or end a recording between two steps."""
        if self._recording is not None:
            self._recording.end_step()
            if trainer.global_step >= self._until:
                self._finish(trainer)
        pulse = trainer.session.pulse
        if self._due and trainer.global_step == self.start_step:
            self._due = False
            self._begin(trainer, self.num_steps)
        elif pulse.wished:
            pulse.wished = False
            if self._recording is None:
                self._begin(trainer, trainer.engine.comm.run_on_main(self._take_request))
        if self._recording is not None:
            self._recording.begin_step()

    def _take_request(self) -> int:
        try:
            asked = self._request.read_text().strip()
            self._request.unlink(missing_ok=True)
        except OSError:
            asked = ""
        return int(asked) if asked.isdecimal() and int(asked) else self.num_steps

    def _begin(self, trainer: Trainer, steps: int) -> None:
        first = trainer.global_step
        total = trainer.session.total_steps
        self._until = first + steps if total is None else max(first + 1, min(first + steps, total))
        folder = trainer.engine.comm.run_on_main(lambda: _new_folder(trainer.run_dir / FOLDER, first, self._until - 1))
        self.folders.append(folder)
        trainer.session.tell(f"Timeline: recording steps {first} to {self._until - 1}")
        self._recording = Recording(trainer, folder, self._takes_torch)

    def _finish(self, trainer: Trainer) -> None:
        assert self._recording is not None
        is_written = self._recording.finish()
        self._recording = None
        if is_written:
            see = f"python -m trainkit timeline {short(trainer.run_dir)}"
            trainer.session.tell(f"Timeline: recorded into {short(self.folders[-1])}. See what it says: {see}")

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """The batch is there."""
        if self._recording is not None:
            self._recording.mark("data")

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Any) -> None:
        """Forward is done."""
        if self._recording is not None:
            self._recording.mark("forward")

    def on_after_backward(self, trainer: Trainer, task: Task) -> None:
        """Backward is done."""
        if self._recording is not None:
            self._recording.mark("backward")

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What follows is the next batch, or the sums."""
        if self._recording is not None:
            self._recording.mark("hooks")

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """The sums are there, unscaled and clipped."""
        if self._recording is not None:
            self._recording.mark_sums()

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """A validation within or after a step is none of its parts."""
        if self._recording is not None:
            within = "hooks" if trainer.state.step_open else "epoch end"  # before it the epoch's values are gathered
            self._recording.mark("optimizer" if not self._recording.updated else within)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """It is over."""
        if self._recording is not None:
            self._recording.mark("validation")

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """The update is done."""
        if self._recording is not None:
            self._recording.mark("optimizer" if not self._recording.updated else "hooks")

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        """End what goes on."""
        if self._recording is not None:
            self._recording.end_step(is_last=True)
            self._finish(trainer)
        elif self._due and self.start_step is not None:
            trainer.session.tell(
                f"Timeline: nothing was recorded: callbacks.timeline.start_step is {self.start_step}, and training ended at "
                f"step {trainer.global_step}."
            )

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Make one file of each recording."""
        if trainer.is_global_zero:
            for folder in recordings(trainer.run_dir):
                if (folder / WHOLE).exists():
                    continue
                try:
                    path = write_whole(folder)
                    trainer.session.tell(f"Timeline: {short(path)} opens in ui.perfetto.dev and chrome://tracing")
                except (TraceError, OSError) as error:
                    trainer.session.tell(f"Timeline: {short(folder)} could not be made one file: {error}")

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Close what an error or a signal left open."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
            trainer.session.tell(f"Timeline: the recording was broken off before step {trainer.global_step}.")
        if self._before is not None:
            signal.signal(signal.SIGUSR2, self._before)
            self._before = None


def _new_folder(place: Path, first: int, last: int) -> Path:
    """Return the recording's folder, empty: one of the same steps is of an earlier try."""
    folder = place / f"steps-{first}-{last}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"Timeline cannot write {folder}: {error.strerror}. Leave callbacks=timeline out.") from error
    return folder
