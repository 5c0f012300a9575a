"""WaitingLine: how long the first item of a batch waits for others."""

from __future__ import annotations

import asyncio

import pytest

from trainkit.extensions.serving.waiting import WaitingLine


def line_of(max_batch_size: int) -> WaitingLine[int]:
    """Return a line in which an item waits a minute for others."""
    return WaitingLine[int]("samples", max_batch_size, 60, 8)


def test_a_full_batch_waits_no_longer() -> None:
    """It is taken as its last item comes, and what is beyond it waits for the next."""

    async def take() -> tuple[list[int], list[int]]:
        line = line_of(2)
        line.add([1])
        batch = asyncio.create_task(line.next_batch())
        await asyncio.sleep(0)
        assert not batch.done()
        line.add([2, 3])
        first = await asyncio.wait_for(batch, 20)
        line.add([4])
        return first, await asyncio.wait_for(line.next_batch(), 20)

    assert asyncio.run(take()) == ([1, 2], [3, 4])


def test_the_wait_begins_as_the_first_item_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the batch before it ends: an item that waited for that one is taken at once."""

    async def take() -> list[int]:
        line, loop = line_of(8), asyncio.get_running_loop()
        clock = loop.time
        line.add([1])
        monkeypatch.setattr(loop, "time", lambda: clock() + 61)
        line.add([2])
        return await asyncio.wait_for(line.next_batch(), 20)

    assert asyncio.run(take()) == [1, 2]


def test_without_others_the_wait_ends() -> None:
    """An item alone is taken after the wait, and the line is then empty: the next one waits."""

    async def take() -> list[int]:
        line = WaitingLine[int]("samples", 8, 0.01, 8)
        line.add([1])
        batch = await asyncio.wait_for(line.next_batch(), 20)
        following = asyncio.create_task(line.next_batch())
        await asyncio.sleep(0)
        assert not following.done()
        line.add([2])
        return batch + await asyncio.wait_for(following, 20)

    assert asyncio.run(take()) == [1, 2]
