"""StepClock: where the time of steps goes on this rank, by its own clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainkit.api.callback import Callback
from trainkit.data.feed import StreamFeed

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

PARTS = ("data", "compute", "communication", "optimizer", "hooks")
_KEPT = 4096  # steps whose durations are kept


@dataclass(frozen=True)
class Times:
    """A reading of a StepClock, or what lies between two: `later - earlier`.

    Attributes:
        steps: that were counted.
        seconds: all together, by part.
    """

    steps: int
    seconds: dict[str, float]

    def __sub__(self, earlier: Times) -> Times:
        return Times(self.steps - earlier.steps, {part: s - earlier.seconds[part] for part, s in self.seconds.items()})

    def per_step(self) -> dict[str, float]:
        """Return the mean seconds of a step, by part."""
        return {part: seconds / max(1, self.steps) for part, seconds in self.seconds.items()}

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return sum(self.seconds.values()) / max(1, self.steps)


class StepClock(Callback):
    """Adds up the seconds of a rank's main thread, from one hook to the next. The first of the callbacks, where one of them
    has `uses_step_clock`; they read it as `trainer.step_clock`.

        begin         on_train_step_start        ends "hooks": what callbacks did between two steps; of a stream, which is
                                                 read there, "data"
        batch_came    on_train_batch_start       ends "data": waiting for the loader
        batch_done    on_train_batch_end         ends "compute": forward and backward
        sums_came     on_before_optimizer_step   ends "communication": what of the sums backward did not hide
        end           on_train_step_end          ends "optimizer"

    On a GPU the host runs ahead: there compute is what CUDA events say, and the waiting for it is taken off communication.

    Attributes:
        steps: counted since training began; validations are left out.
        durations: the seconds of the last steps, the newest last, by the host's clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._reset(torch.device("cpu"), stream=False)

    def _reset(self, device: torch.device, stream: bool) -> None:
        self._on_gpu, self._stream = device.type == "cuda", stream
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._device_s = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._running = False
        self._mark = self._began = 0.0
        self.steps = 0
        self.durations: deque[float] = deque(maxlen=_KEPT)

    def read(self) -> Times:
        """Return what was added up since training began. On a GPU it waits for the steps that were counted."""
        if self._events:
            torch.cuda.synchronize()
            self._settle()
        ahead = max(0.0, self._device_s - self._seconds["compute"]) if self._on_gpu else 0.0
        waited = max(0.0, self._seconds["communication"] - ahead)
        compute = self._seconds["compute"] + ahead
        return Times(self.steps, self._seconds | {"compute": compute, "communication": waited})

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Start from nothing."""
        self._reset(trainer.engine.device, isinstance(trainer.session.run.feed, StreamFeed))

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """Begin a step."""
        self.begin()

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """The batch is on the device."""
        self.batch_came()

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Its backward has been run, or queued."""
        self.batch_done()

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """The gradients are those of the whole step."""
        self.sums_came()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """End the step."""
        self.end()

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """Something else than training follows; it does not count."""
        self.pause()

    def begin(self) -> None:
        """A step begins."""
        if self._running:
            self._add("data" if self._stream else "hooks")
        else:
            self._running, self._mark = True, self._now()
            self._began = self._mark

    def batch_came(self) -> None:
        """A batch is on the device."""
        self._add("data")
        if self._on_gpu:
            self._started = _event()

    def batch_done(self) -> None:
        """Its backward has been run, or queued."""
        self._add("compute")
        if self._on_gpu:
            self._events.append((self._started, _event()))

    def sums_came(self) -> None:
        """The gradients are those of the whole step."""
        self._add("communication")

    def end(self) -> None:
        """The step is over."""
        self._add("optimizer")
        self.steps += 1
        self.durations.append(self._mark - self._began)
        self._began = self._mark
        self._settle()

    def pause(self) -> None:
        """Training does not go on at once."""
        self._running = False

    def _settle(self) -> None:
        """Take in the events that have happened; waits for none."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._events.popleft()
            self._device_s += begun.elapsed_time(ended) / 1000

    def _add(self, part: str) -> None:
        now = self._now()
        self._seconds[part] += now - self._mark
        self._mark = now


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def is_log_step(trainer: Trainer, ahead: int = 0, every_n_steps: int | None = None) -> bool:
    """Whether step values are written at this step.

    Args:
        trainer: whose `log_every_n_steps` says so.
        ahead: 1 within a step, which is counted only when its update is done.
        every_n_steps: in its place.
    """
    return (trainer.global_step + ahead) % (every_n_steps or trainer.settings.limits.log_every_n_steps) == 0


def write(trainer: Trainer, values: dict[str, float]) -> None:
    """Hand numbers of this step to the loggers, on rank 0; on the others nothing happens."""
    if values and trainer.is_global_zero:
        trainer.session.hooks("on_metrics", values, trainer.global_step)
