"""TextBatcher: answers of requests that come together are made in one batch, in a thread of its own,
and each piece of text goes to its request as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trainkit.extensions.language.sampling import Answer, continue_all
from trainkit.extensions.language.sources import ModelSource
from trainkit.extensions.serving.waiting import WaitingLine


class TextPiece(NamedTuple):
    """A piece of a text: of which answer of its request, and why that ended, or ""."""

    place: int
    text: str
    finish: str


class _Waiting(NamedTuple):
    answer: Answer
    place: int
    pieces: asyncio.Queue[TextPiece | Exception]


class TextBatcher:
    """Use it in one event loop. A batch is answered to its end before the next one.

    Attributes:
        num_batches: batches so far.
        num_answers: answers in them.
    """

    def __init__(
        self, source: ModelSource, max_batch_size: int, wait_s: float, max_waiting: int
    ) -> None:
        """Build it.

        Args:
            source: the model.
            max_batch_size: answers of a batch at most.
            wait_s: so long the first one of a batch waits for others.
            max_waiting: answers that may wait; more are refused.
        """
        self._source = source
        self._line = WaitingLine[_Waiting]("answers", max_batch_size, wait_s, max_waiting)
        self.check_room = self._line.check_room
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "model")
        self.num_batches = self.num_answers = 0

    async def pieces(self, answers: Sequence[Answer]) -> AsyncIterator[TextPiece]:
        """Yield the pieces of a request's answers, until all have ended; an answer that is no
        longer listened to is given up.
        """
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        pieces: asyncio.Queue[TextPiece | Exception] = asyncio.Queue()
        self._line.add(_Waiting(one, place, pieces) for place, one in enumerate(answers))
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
            batch = await self._line.next_batch()
            batch = [waiting for waiting in batch if not waiting.answer.finish]
            if batch:
                self.num_batches = self.num_batches + 1
                self.num_answers = self.num_answers + len(batch)
                await loop.run_in_executor(self._thread, self._answer, batch, loop)

    def _answer(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        """Make the answers; called in the thread."""
        of = {id(waiting.answer): waiting for waiting in batch}

        def put(one: Answer, piece: TextPiece | Exception) -> None:
            loop.call_soon_threadsafe(of[id(one)].pieces.put_nowait, piece)

        try:
            answers = [waiting.answer for waiting in batch]
            for one, text in continue_all(self._source, answers, failed=put):
                put(one, TextPiece(of[id(one)].place, text, one.finish))
        except Exception as error:  # any of the model's; its requests answer it, the worker lives
            for waiting in batch:
                put(waiting.answer, error)
