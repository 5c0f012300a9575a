"""Batcher: a request that has gone, or that the model refuses, takes no other with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from trainkit.extensions.serving.batching import Batcher


class Refusing:
    """Refuses sample 1, alone or in a batch; its first call waits for a gate."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    def answer(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the samples."""
        self.begun.set()
        assert self.gate.wait(60)
        if 1 in samples:
            raise ValueError("the model refuses it")
        return [{"output": sample} for sample in samples]


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_a_cancelled_request_takes_no_other_with_it(max_batch_size: int) -> None:
    """Its sample, which the model refuses, is in the model as its client goes; one beside it in the
    batch, or after it in the line, is answered.
    """
    model: Any = Refusing()

    async def talk() -> list[dict[str, Any]]:
        batcher = Batcher(model, max_batch_size, 0, 8)
        sample: Any = (1, 2)
        first, second = (asyncio.create_task(batcher.predict([one])) for one in sample)
        await asyncio.to_thread(model.begun.wait, 60)
        first.cancel()
        await asyncio.wait([first])
        model.gate.set()
        return await asyncio.wait_for(second, 20)

    assert asyncio.run(talk()) == [{"output": 2}]
