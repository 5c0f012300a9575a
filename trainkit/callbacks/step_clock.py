"""StepClock: measures the parts of steps on this rank, by its own clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.data.early import Fetching
from trainkit.data.feed import StreamFeed
from trainkit.device.accelerator import is_accelerator, mark

PARTS = ("data", "compute", "communication", "optimizer", "hooks")
_KEPT = 4096  # steps whose durations are retained


@dataclass(frozen=True)
class Times:
    """A reading of a StepClock, or the difference of two: `later - earlier`.

    Attributes:
        steps: number of steps counted.
        seconds: their sum, by part.
    """

    steps: int
    seconds: dict[str, float]

    def __sub__(self, earlier: Times) -> Times:
        return Times(
            self.steps - earlier.steps,
            {part: s - earlier.seconds[part] for part, s in self.seconds.items()},
        )

    def per_step(self) -> dict[str, float]:
        """Return the mean seconds per step, by part."""
        return {part: seconds / max(1, self.steps) for part, seconds in self.seconds.items()}

    @property
    def step_s(self) -> float:
        """The mean seconds per step."""
        return sum(self.seconds.values()) / max(1, self.steps)


class StepClock(Callback):
    """Adds up the seconds of a rank's main thread, from hook to hook. It is the first callback if
    any callback sets `uses_step_clock`; they read it by `step_clock_of(trainer)`.

        on_train_step_start        ends "hooks", the callbacks between two steps; for a stream, "data"
        on_train_batch_start       ends "data": waiting for the loader
        on_after_backward          ends "compute": forward and backward
        on_before_optimizer_step   ends "communication": the part of the reduction that backward did not hide
        on_train_step_end          ends "optimizer"

    On a GPU the host runs ahead: compute is then taken from its events, and the wait for it is
    subtracted from communication. A wait for the next step's batch in between (data/early.py) counts as
    "data" if the device had nothing to compute meanwhile.

    Attributes:
        steps: steps since training began; validations are left out.
        durations: the seconds of the last steps, newest last, by the host's clock.
    """

    role = "step_clock"
    runs_first = may_differ = True

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._reset(torch.device("cpu"), stream=False, fetching=Fetching())

    def _reset(self, device: torch.device, stream: bool, fetching: Fetching) -> None:
        self._on_gpu = is_accelerator(device)
        self._stream = stream
        self._fetching = fetching
        self._fetched_ns = fetching.waited_ns
        self._early_s = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._device_s = 0.0
        self._events: deque[tuple[torch.Event, torch.Event]] = deque()
        self._running = False
        self._mark = self._began = self._paused = 0.0
        self.steps = 0
        self.durations: deque[float] = deque(maxlen=_KEPT)

    def read(self) -> Times:
        """Return the sums since training began. On a GPU it waits for the steps counted so far."""
        if self._events:
            torch.accelerator.synchronize()
            self._settle()
        ahead = max(0.0, self._device_s - self._seconds["compute"]) if self._on_gpu else 0.0
        early = self._early_s
        waited = max(0.0, self._seconds["communication"] - max(0.0, ahead - early))
        compute = self._seconds["compute"] + ahead
        data = self._seconds["data"] + max(0.0, early - ahead)
        own = {"data": data, "compute": compute, "communication": waited}
        return Times(self.steps, self._seconds | own)

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        feed = trainer.train_feed
        self._reset(trainer.engine.device, isinstance(feed, StreamFeed), feed.fetching)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Start a step; end the time between steps."""
        if self._running:
            self._add("data" if self._stream else "hooks")
        else:
            self._running, self._mark = True, self._now()
            self._began = self._mark

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """End the wait for a batch, which is on the device now."""
        self._add("data")
        if self._on_gpu:
            self._started = mark(timed=True)

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """End forward and backward, run or queued."""
        if task.automatic_optimization:
            self._end_compute()

    def on_train_batch_end(
        self, trainer: RunView, task: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The same of a Task that runs backward itself, as often as it likes."""
        if not task.automatic_optimization:
            self._end_compute()

    def _end_compute(self) -> None:
        self._add("compute")
        if self._on_gpu:
            self._events.append((self._started, mark(timed=True)))

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """End the wait for the reduction: the gradients of the whole step are there."""
        self._add("communication")
        fetched_ns = self._fetching.waited_ns
        early_s = (fetched_ns - self._fetched_ns) / 1e9
        self._fetched_ns = fetched_ns
        self._early_s += early_s
        self._seconds["communication"] -= early_s

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._add("optimizer")
        self.steps += 1
        self.durations.append(self._mark - self._began)
        self._began = self._mark
        self._settle()

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Pause: the time until the next step does not count."""
        self._running, self._paused = False, self._now()

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        """Leave the validation out of a step within which it ran."""
        lasted = self._now() - self._paused
        self._mark, self._began = self._mark + lasted, self._began + lasted

    def _settle(self) -> None:
        """Add the events that have completed, without waiting."""
        while self._events and self._events[0][1].query():
            begun, ended = self._events.popleft()
            self._device_s += begun.elapsed_time(ended) / 1000

    def _add(self, part: str) -> None:
        now = self._now()
        self._seconds[part] += now - self._mark
        self._mark = now
