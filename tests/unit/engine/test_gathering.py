"""Gathering: bytes of all ranks by one collective, while they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.helpers.threads import ThreadEngine, World
from trainkit.engine.gathering import Gathering


def gather_in_turn(
    engine: ThreadEngine, rounds: list[list[int]]
) -> tuple[list[list[bytes]], list[int]]:
    """Gather given numbers of bytes of each rank in each round;
    return the results, and this rank's size of each collective.
    """
    started: list[int] = []
    plain = engine.comm.start_gather

    def start(own: Tensor) -> Callable[[], Tensor]:
        started.append(len(own))
        return plain(own)

    engine.comm.start_gather = start  # type: ignore[method-assign]
    gathering = Gathering(engine.comm)
    with engine:
        came = [
            gathering.start(bytes([engine.ranks.rank + 1]) * sizes[engine.ranks.rank])()
            for sizes in rounds
        ]
    return [[bytes(part) for part in parts] for parts in came], started


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_fits_takes_one_collective_of_a_size_that_stays(ranks: int) -> None:
    """However many bytes each rank has, from none on."""
    rounds = [[100 * i + rank for rank in range(ranks)] for i in range(4)]
    expected = [[bytes([rank + 1]) * size for rank, size in enumerate(sizes)] for sizes in rounds]
    for came, started in World(ranks).run(lambda engine: gather_in_turn(engine, rounds)):
        assert came == expected
        assert len(started) == 4 and len(set(started)) == 1


def test_the_room_of_a_rank_that_needs_more_grows_once() -> None:
    """All ranks gather a second time, in that round alone; the other ranks' rooms stay."""
    rounds = [[10, 10], [10, 100_000], [10, 110_000], [10, 10]]
    expected = [[bytes([rank + 1]) * size for rank, size in enumerate(sizes)] for sizes in rounds]
    found: list[Any] = World(2).run(lambda engine: gather_in_turn(engine, rounds))
    assert [came for came, _ in found] == [expected] * 2
    (_, small), (_, large) = found
    assert len(small) == len(large) == 5 and len(set(small)) == 1
    assert large[0] == large[1] < 110_000 < large[2] == large[4]


@pytest.mark.parametrize("size", [24 * 1024 - 8, 24 * 1024 - 7])
def test_bytes_that_just_fit(size: int) -> None:
    """The length takes 8 bytes of the room."""
    for came, started in World(2).run(lambda engine: gather_in_turn(engine, [[size, 0]])):
        assert came == [[b"\x01" * size, b""]]
        assert len(started) == 1 + (size > 24 * 1024 - 8)
