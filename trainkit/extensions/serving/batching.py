"""Batcher: samples of requests that come together are answered in one call of the model,
in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainkit.extensions.serving.model import Sample, ServedModel
from trainkit.extensions.serving.waiting import WaitingLine

Waiting = tuple[Sample, "asyncio.Future[dict[str, Any]]"]


class Batcher:
    """Use it in one event loop.

    Attributes:
        num_batches: calls of the model.
        num_samples: samples in them.
    """

    def __init__(
        self, model: ServedModel, max_batch_size: int, wait_s: float, max_waiting: int
    ) -> None:
        """Build it.

        Args:
            max_batch_size: samples of a call at most.
            wait_s: so long the first sample of a batch waits for others.
            max_waiting: samples that may wait; more are refused.
        """
        self._model = model
        self._line = WaitingLine[Waiting]("samples", max_batch_size, wait_s, max_waiting)
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "model")
        self.num_batches = self.num_samples = 0

    async def predict(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return the predictions of a request's samples.

        Raises:
            RequestError: they are more than may wait, too many wait already, or the model refuses
                one.
        """
        self._line.check_room(len(samples))
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        futures = [loop.create_future() for _ in samples]
        self._line.add(zip(samples, futures, strict=True))
        predictions = await asyncio.gather(*futures, return_exceptions=True)
        for item in predictions:
            if isinstance(item, BaseException):
                raise item
        return predictions  # type: ignore[return-value]

    async def _work(self) -> None:
        while True:
            batch = await self._line.next_batch()
            await self._answer(batch)

    async def _answer(self, batch: Sequence[Waiting]) -> None:
        batch = [waiting for waiting in batch if not waiting[1].done()]  # its client has gone
        if not batch:
            return
        loop = asyncio.get_running_loop()
        self.num_batches = self.num_batches + 1
        self.num_samples = self.num_samples + len(batch)
        answers: Sequence[dict[str, Any] | Exception]
        try:
            answers = await loop.run_in_executor(
                self._thread, self._model.answer, [sample for sample, _ in batch]
            )
        except Exception as error:  # any of the model's
            answers = [error] * (len(batch) == 1)
        if not answers:
            # It is of one request, and not of its neighbours. Here, where the error no longer holds
            # the memory of its frames.
            for waiting in batch:
                await self._answer([waiting])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():  # its client has gone meanwhile
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
