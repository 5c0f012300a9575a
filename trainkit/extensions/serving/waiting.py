"""WaitingLine: what requests that come together bring, taken in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Generic, TypeVar

from trainkit.extensions.serving.body import RequestError

Item = TypeVar("Item")


class WaitingLine(Generic[Item]):
    """Use it in one event loop.

    Args:
        what: "samples" or "answers", for messages.
        max_batch_size: items of a batch at most.
        wait_s: so long the first one of a batch waits for others, from its arrival; a full batch
            waits no longer.
        max_waiting: items that may wait; more are refused.
    """

    def __init__(self, what: str, max_batch_size: int, wait_s: float, max_waiting: int) -> None:
        self._what = what
        self._most = max_batch_size
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._items: list[tuple[float, Item]] = []  # when each came
        self._more = asyncio.Event()
        self._full = asyncio.Event()

    def check_room(self, count: int) -> None:
        """Raise if so many items may not wait.

        Raises:
            RequestError: 413 if they never may, 503 if they may later.
        """
        if count > self._max_waiting:
            raise RequestError(
                413,
                f"The request has {count} {self._what}, and {self._max_waiting} may wait"
                " (max_waiting): send fewer.",
            )
        if len(self._items) + count > self._max_waiting:
            raise RequestError(
                503,
                f"{len(self._items)} {self._what} wait, and {self._max_waiting} may. Try again"
                " later.",
            )

    def add(self, items: Iterable[Item]) -> None:
        """Let items wait."""
        now = asyncio.get_running_loop().time()
        self._items += [(now, item) for item in items]
        self._set_events()

    async def next_batch(self) -> list[Item]:
        """Wait for items, and take those of a batch."""
        await self._more.wait()
        left_s = self._items[0][0] + self._wait_s - asyncio.get_running_loop().time()
        if left_s > 0 and not self._full.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), left_s)
        batch = self._items[: self._most]
        self._items = self._items[self._most :]
        self._set_events()
        return [item for _, item in batch]

    def _set_events(self) -> None:
        for event, least in ((self._more, 1), (self._full, self._most)):
            if len(self._items) >= least:
                event.set()
            else:
                event.clear()
