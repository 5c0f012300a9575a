"""Ranks as threads share torch's default generator:
no collection of cycles may start while one holds its lock.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.elastic_threads import Job
from tests.helpers.threads import World


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The collections that are started, one at nearly every object that is made."""
    started: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        started.append(phase)

    held = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1000, 1000)
    yield started
    gc.set_threshold(*held)
    gc.callbacks.remove(note)


@pytest.mark.parametrize(
    "start",
    [lambda work: World(1).run(work), lambda work: Job(work, 1).run("a")],
    ids=["world", "job"],
)
def test_no_collection_starts_while_ranks_run(start, collections: list[str]) -> None:  # type: ignore[no-untyped-def]
    """A collection inside torch.get_rng_state runs Python code under the generator's lock,
    and ranks would block forever.
    """
    seen: list[int] = []

    def work(engine: object) -> None:
        before = len(collections)
        kept = [[torch.get_rng_state()] for _ in range(100)]
        seen.extend([len(kept), len(collections) - before])

    start(work)
    assert seen == [100, 0]
    assert gc.isenabled()


def test_a_collection_is_seen(collections: list[str]) -> None:
    """The count above sees the collections that reading the state starts outside a World."""
    kept = [[torch.get_rng_state()] for _ in range(100)]
    assert len(kept) == 100
    assert collections
