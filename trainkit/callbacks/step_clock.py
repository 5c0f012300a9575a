"""StepClock: where the time of steps goes on this rank, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

PARTS = ("data", "compute", "communication", "optimizer", "hooks")


class StepClock:
    """Adds up the seconds of a rank's main thread, from one call to the next. Callbacks call it from their hooks:

        begin             on_train_step_start        ends "hooks": what callbacks did between two steps; of a stream, which
                                                     is read there, "data"
        batch_came        on_train_batch_start       ends "data": waiting for the loader
        batch_done        on_train_batch_end         ends "compute": forward and backward
        sums_came         on_before_optimizer_step   ends "communication": what of the sums backward did not hide
        end               on_train_step_end          ends "optimizer"

    On a GPU the host runs ahead: there compute is what CUDA events say, which are read when they are asked for, and the
    waiting for it is taken off communication.

    Attributes:
        seconds: by part.
        steps: that were counted.
    """

    def __init__(self, device: torch.device, stream: bool = False, now: Callable[[], float] = time.perf_counter) -> None:
        """Start with nothing."""
        self._stream = stream
        self._now, self._on_gpu = now, device.type == "cuda"
        self.clear()
        self._mark = 0.0

    def clear(self) -> None:
        """Start again with nothing."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._running = False
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def pause(self) -> None:
        """Something else than training follows; it does not count."""
        self._running = False

    def begin(self) -> None:
        """A step begins."""
        if self._running:
            self._add("data" if self._stream else "hooks")
        else:
            self._running, self._mark = True, self._now()

    def batch_came(self) -> None:
        """A batch is on the device."""
        self._add("data")
        if self._on_gpu:
            self._started = self._event()

    def batch_done(self) -> None:
        """Its backward has been run, or queued."""
        self._add("compute")
        if self._on_gpu:
            self._events.append((self._started, self._event()))

    def sums_came(self) -> None:
        """The gradients are those of the whole step."""
        self._add("communication")

    def end(self) -> None:
        """The step is over."""
        self._add("optimizer")
        self.steps += 1

    def per_step(self) -> dict[str, float]:
        """Return the mean seconds of a step by part. On a GPU it waits for the steps that were counted."""
        if self._events:
            torch.cuda.synchronize()
            on_device = sum(begun.elapsed_time(ended) for begun, ended in self._events) / 1000
            ahead = max(0.0, on_device - self.seconds["compute"])
            self.seconds["compute"] += ahead
            self.seconds["communication"] = max(0.0, self.seconds["communication"] - ahead)
            self._events.clear()
        return {part: seconds / max(1, self.steps) for part, seconds in self.seconds.items()}

    def _add(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self._mark
        self._mark = now

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
