"""Batches that are read in the training process: each when it is pulled, none ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.data.loader import ShardedLoader, read_source
from trainkit.data.order import SeededDataset
from trainkit.data.plan import StepPlan
from trainkit.errors import DataError


class Numbers(Dataset[int]):
    """Returns the index, notes what was read;
    at `fails` it raises, and with `draws` it adds a random number.
    """

    def __init__(self, length: int = 40, fails: int = -1, draws: bool = False) -> None:
        self.length, self.fails, self.draws = length, fails, draws
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.fails:
            raise OSError("broken")
        self.seen.append(index)
        return index + random.random() if self.draws else index


def keys(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the keys of batches of four."""
    return iter(
        [[(0, index) for index in range(first, first + 4)] for first in range(0, 4 * count, 4)]
    )


@pytest.mark.parametrize("draws", [False, True])
def test_the_batches_are_those_of_one_at_a_time(draws: bool) -> None:
    """Random numbers included."""
    alone, ahead = SeededDataset(Numbers(draws=draws), 3), SeededDataset(Numbers(draws=draws), 3)
    assert list(ahead.batches(keys(10))) == [alone.__getitems__(batch) for batch in keys(10)]


def test_an_error_comes_after_the_batches_before_it() -> None:
    """Though it was met when several were read at a time."""
    samples = []
    with pytest.raises(DataError, match="broken"):
        for batch in SeededDataset(Numbers(fails=33), 0).batches(keys(10)):
            samples += batch
    assert samples == list(range(32))


def test_no_batch_is_read_ahead() -> None:
    """However fast they are: what a data set returns may depend on the steps before."""
    dataset = Numbers()
    for taken, _ in enumerate(SeededDataset(dataset, 0).batches(keys(10)), 1):
        assert len(dataset.seen) == 4 * taken


def pairs(samples: list[int]) -> list[tuple[int, int]]:
    """A collate_fn."""
    return [(sample, -sample) for sample in samples]


def test_a_loader_without_workers_gives_what_one_with_a_worker_does() -> None:
    """The user's collate_fn included."""

    epochs = []
    for workers in (0, 1):
        source = read_source(
            DataLoader(Numbers(), 8, shuffle=True, num_workers=workers, collate_fn=pairs),
            "data",
            True,
        )
        assert source is not None
        loader = ShardedLoader(source, StepPlan(40, 8, 2), 1, 5, lambda order: order)
        epochs.append(list(loader.iterate(loader.plan, 1, 1)))
        loader.close()
    assert epochs[0] == epochs[1] and len(epochs[0]) == 2
    assert torch.tensor(epochs[0][0]).sum() == 0
