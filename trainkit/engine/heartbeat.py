"""What others may see of a rank while it works: where it is, what it waits for, and the sums of gradients that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainkit.engine.reduce.reducer import GradientReducer, Summed


class Whereabouts(Protocol):
    """Where this rank is, for a thread that watches it; written without a lock.

    Attributes:
        step: the optimizer steps taken.
        progress: rises while the main thread gets on.
        waiting: what it waits for the other ranks with, as "the sums of gradients"; "" where it waits for nobody.
    """

    step: int
    progress: int
    waiting: str


@dataclass
class Here:
    """Whereabouts that nobody but this process reads."""

    step: int = 0
    progress: int = 0
    waiting: str = ""


class Observed:
    """The half of an engine that a watchdog and a timeline use.

    Attributes:
        whereabouts: where this rank is.
    """

    whereabouts: Whereabouts

    def watch(self, stall_s: float, on_dump: Callable[[], None]) -> bool:
        """Have the launcher watch over the ranks, where it can.

        Args:
            stall_s: seconds without progress after which a rank counts as stalled, where others wait for it.
            on_dump: is called, from a thread, when the stacks of all threads are to be written.

        Returns:
            Whether it does; otherwise the ranks must watch each other.
        """
        return False

    def outstanding(self) -> list[str]:
        """Return the names of the tensors that wait for the other ranks now, as far as known. May be called by a thread."""
        return []

    def start_timeline(self, path: Path) -> str:
        """Note down each sum of gradients from now on. Call it on all ranks, between two steps.

        Args:
            path: of this rank, for the framework's own timeline, where it has one.

        Returns:
            What the timeline lacks, and why; "" where it lacks nothing.
        """
        if (sums := self._recordable()) is not None:
            sums.record(True)
        return ""

    def stop_timeline(self) -> None:
        """Note down nothing any more."""
        if (sums := self._recordable()) is not None:
            sums.record(False)

    def take_summed(self) -> list[Summed]:
        """Return the sums of gradients that were noted since the last call."""
        sums = self._recordable()
        return [] if sums is None else sums.take_summed()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """What a timeline should say of how gradients are summed: fields of tracing.pieces.About."""
        return {}

    def _recordable(self) -> GradientReducer | None:
        """Return what sums gradients, where it can note that down."""
        return None
