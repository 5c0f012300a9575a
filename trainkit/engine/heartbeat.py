"""What a watchdog and a timeline see of a rank while it works:
its step, what it waits for, and its sums of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainkit.engine.reduce.reducer import GradientReducer, Summed


class Position(Protocol):
    """How far this rank is, for a thread that watches it; written without a lock.

    Attributes:
        step: optimizer steps taken.
        progress: a counter that rises while the main thread makes progress.
        waiting: what the main thread waits for the other ranks with, as "the sums of gradients"; ""
            while it computes.
    """

    step: int
    progress: int
    waiting: str


class Watcher(Position, Protocol):
    """A launcher that watches this rank by its Position.

    Attributes:
        tensors: returns the names of the tensors that wait for the other ranks; a thread calls it.
        stall_s: seconds without progress after which this rank counts as stalled; None: never.
        on_dump: is called, from a thread, when the stacks of all threads are to be written.
        on_broken: is called, from a thread, when this rank waits for ranks that are gone.
    """

    tensors: Callable[[], list[str]]
    stall_s: float | None
    on_dump: Callable[[], None] | None
    on_broken: Callable[[], None] | None


@dataclass
class LocalPosition:
    """A Position that threads of this process alone read."""

    step: int = 0
    progress: int = 0
    waiting: str = ""


class Heartbeat:
    """The base, for an engine whose framework has no timeline of its own.

    Attributes:
        reducer: what sums gradients at present; the engine sets it. None if nothing does, or if it
            records nothing.

    Args:
        watcher: the launcher that watches this process, as an elastic driver; None if it does not.
        sum_settings: see the property.
    """

    def __init__(
        self, watcher: Watcher | None = None, sum_settings: dict[str, Any] | None = None
    ) -> None:
        self._position: Position = watcher or LocalPosition()
        self._watcher = watcher
        self._sum_settings = sum_settings or {}
        self.reducer: GradientReducer | None = None
        if watcher is not None:
            watcher.tensors = self.outstanding

    @property
    def step(self) -> int:
        """The optimizer steps taken."""
        return self._position.step

    @step.setter
    def step(self, step: int) -> None:
        self._position.step = step

    @property
    def progress(self) -> int:
        """A counter that rises while the main thread makes progress."""
        return self._position.progress

    @progress.setter
    def progress(self, progress: int) -> None:
        self._position.progress = progress

    def count_progress(self) -> None:
        """Let those that watch know that the main thread gets on."""
        self._position.progress += 1

    @property
    def waiting(self) -> str:
        """What the main thread waits for the other ranks with; "" while it computes."""
        return self._position.waiting

    @waiting.setter
    def waiting(self, waiting: str) -> None:
        self._position.waiting = waiting

    @property
    def awaited(self) -> str:
        """What this rank waits for the other ranks with: `waiting`, or on a GPU the sums that its
        device waits for while the main thread runs ahead; "" while it computes.
        """
        if self.waiting or self.reducer is None or not self.reducer.is_awaited():
            return self.waiting
        return "the sums of gradients"

    def watch(self, stall_s: float, on_dump: Callable[[], None]) -> bool:
        """Ask the launcher to watch the ranks.

        Args:
            stall_s: seconds without progress after which a rank that others wait for counts as
                stalled.
            on_dump: is called, from a thread, when the stacks of all threads are to be written.

        Returns:
            Whether the launcher does; if not, the ranks must watch each other.
        """
        if self._watcher is None:
            return False
        self._watcher.stall_s = stall_s
        self._watcher.on_dump = on_dump
        return True

    def outstanding(self) -> list[str]:
        """Return the names of the tensors that wait for the other ranks now, as far as known.
        A thread may call it.
        """
        return [] if self.reducer is None else self.reducer.outstanding()

    def start_timeline(self, path: Path) -> str:
        """Record each sum of gradients from now on. Call it on all ranks, between two steps.

        Args:
            path: of this rank, for the framework's own timeline, if it has one.

        Returns:
            What the timeline lacks, and why; "" if it is complete.
        """
        if self.reducer is not None:
            self.reducer.record(True)
        return ""

    def stop_timeline(self) -> None:
        """End the recording."""
        if self.reducer is not None:
            self.reducer.record(False)

    def take_summed(self) -> list[Summed]:
        """Return the sums of gradients that were recorded since the last call."""
        return [] if self.reducer is None else self.reducer.take_summed()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """How gradients are summed, as a timeline shows it: the fields of a recording's About."""
        return self._sum_settings
