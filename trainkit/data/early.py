"""The next batch, fetched while the device computes this step.

Where the host waits for the device in each step (Horovod's sums on GPUs), a batch that is fetched
after the wait is copied while the device has nothing to do. EarlyBatches fetches and moves it
before the wait; it is one batch more on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Moved(NamedTuple):
    """A batch that is on the device."""

    batch: Any


@dataclass
class Fetching:
    """The waits for batches that were fetched early.

    Attributes:
        waited_ns: their sum, on the host.
        ended_ns: when the last one ended, by time.perf_counter_ns; 0: there was none.
    """

    waited_ns: int = 0
    ended_ns: int = 0


class EarlyBatches(Iterator[Any]):
    """Batches as they were loaded, but Moved if they were fetched early.

    Args:
        batches: on the host, from workers: fetching one draws no random number of this process.
        move: moves a batch to the device.
        fetching: adds up the waits.
    """

    def __init__(
        self, batches: Iterator[Any], move: Callable[[Any], Any], fetching: Fetching
    ) -> None:
        self._batches = batches
        self._move = move
        self._fetching = fetching
        self._next: Moved | Exception | None = None

    def fetch(self) -> None:
        """Fetch the next batch and move it, if there is one.
        An error of the data is raised when the batch is due.
        """
        if self._next is not None:
            return
        began = time.perf_counter_ns()
        try:
            self._next = Moved(self._move(next(self._batches)))
        except StopIteration:  # of the epoch's last step
            return
        except Exception as error:
            self._next = error
        self._fetching.ended_ns = time.perf_counter_ns()
        self._fetching.waited_ns += self._fetching.ended_ns - began

    def __next__(self) -> Any:
        """Return the next batch."""
        early, self._next = self._next, None
        if isinstance(early, Exception):
            raise early
        return next(self._batches) if early is None else early
