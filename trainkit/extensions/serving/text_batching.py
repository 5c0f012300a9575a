"""TextBatcher: answers of requests that come together are made in one batch, in a thread of its own,
and each piece of text goes to its request as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trainkit.extensions.language.sampling import Answer, continue_all
from trainkit.extensions.language.sources import Source
from trainkit.extensions.serving.body import RequestError


class Piece(NamedTuple):
    """A piece of a text: of which answer of its request, and why that ended, or ""."""

    place: int
    text: str
    finish: str


class _Waiting(NamedTuple):
    answer: Answer
    place: int
    pieces: asyncio.Queue[Piece | Exception]


class TextBatcher:
    """Use it in one event loop. A batch is answered to its end before the next one.

    Attributes:
        num_batches: batches so far.
        num_answers: answers in them.
    """

    def __init__(
        self, source: Source, max_batch_size: int, wait_s: float, max_waiting: int
    ) -> None:
        """Build it.

        Args:
            source: the model.
            max_batch_size: answers of a batch at most.
            wait_s: so long the first one of a batch waits for others.
            max_waiting: answers that may wait; more are refused.
        """
        self._source = source
        self._most = max_batch_size
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._more = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "model")
        self.num_batches = self.num_answers = 0

    def check_room(self, count: int) -> None:
        """Raise if so many answers may not wait.

        Raises:
            RequestError: 413 if they never may, 503 if they may later.
        """
        if count > self._max_waiting:
            raise RequestError(
                413,
                f"The request has {count} answers, and {self._max_waiting} may wait (max_waiting):"
                " ask for fewer.",
            )
        if len(self._waiting) + count > self._max_waiting:
            raise RequestError(
                503,
                f"{len(self._waiting)} answers wait, and {self._max_waiting} may. Try again later.",
            )

    async def pieces(self, answers: Sequence[Answer]) -> AsyncIterator[Piece]:
        """Yield the pieces of a request's answers, until all have ended; an answer that is no
        longer listened to is given up.
        """
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._waiting += [_Waiting(one, place, pieces) for place, one in enumerate(answers)]
        self._more.set()
        num_left = len(answers)
        try:
            while num_left:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                num_left -= bool(piece.finish)
        finally:
            for one in answers:
                one.finish = one.finish or "left"

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._more.wait()
            if len(self._waiting) < self._most:
                await asyncio.sleep(self._wait_s)
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if not self._waiting:
                self._more.clear()
            batch = [waiting for waiting in batch if not waiting.answer.finish]
            if batch:
                self.num_batches, self.num_answers = (
                    self.num_batches + 1,
                    self.num_answers + len(batch),
                )
                await loop.run_in_executor(self._thread, self._answer, batch, loop)

    def _answer(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        """Make the answers; called in the thread."""
        of = {id(waiting.answer): waiting for waiting in batch}
        try:
            for one, text in continue_all(self._source, [waiting.answer for waiting in batch]):
                waiting = of[id(one)]
                piece = Piece(waiting.place, text, one.finish)
                loop.call_soon_threadsafe(waiting.pieces.put_nowait, piece)
        except Exception as error:  # any of the model's; its requests answer it, the worker lives
            for waiting in batch:
                loop.call_soon_threadsafe(waiting.pieces.put_nowait, error)
