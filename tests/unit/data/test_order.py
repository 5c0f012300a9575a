"""The order of samples and each sample's random numbers: functions of (seed, epoch, index) only."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainkit.data.order import (
    OwnRandomNumbers,
    SeededDataset,
    epoch_order,
    indices_at,
    may_draw,
    mix,
    random_numbers_of,
    shuffled,
)
from trainkit.data.seeding import seed_everything
from trainkit.errors import DataError


class Noise(Dataset[Any]):
    """Each sample draws from all three sources of random numbers."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()

    def __len__(self) -> int:
        return 20


@given(st.integers(1, 50), st.integers(-5, 5), st.integers(0, 5))
def test_an_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    """Each epoch's order holds each index once, and is the same each time."""
    order = shuffled(num_samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert torch.equal(order, shuffled(num_samples, seed, epoch))


def test_orders_differ_over_epochs_and_seeds() -> None:
    """Another epoch or another seed is another order."""
    orders = {tuple(shuffled(20, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_an_order_leaves_the_random_state_alone() -> None:
    """Drawing an order does not move the global random numbers."""
    before = torch.get_rng_state()
    shuffled(20, 0, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_source_of_the_order() -> None:
    """A drawn order wins; else it is shuffled, or the data set's own."""
    assert list(epoch_order(4, True, 0, 0, [3, 3, 1, 0])) == [3, 3, 1, 0]
    assert list(epoch_order(4, False, 0, 0, None)) == [0, 1, 2, 3]
    assert list(epoch_order(9, True, 0, 1, None)) == shuffled(9, 0, 1).tolist()


@given(st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_mix_gives_a_seed_that_torch_takes(numbers: list[int]) -> None:
    """The hash of any whole numbers has at most 63 bits."""
    assert 0 <= mix(*numbers) < 2**63


def test_mix_distinguishes_its_numbers() -> None:
    """Neighbouring numbers, swapped ones and shorter lists all hash differently."""
    hashes = (
        {mix(a, b) for a in range(30) for b in range(30)} | {mix(a) for a in range(30)} | {mix()}
    )
    assert len(hashes) == 931


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    """A sample does not depend on the samples loaded before it."""
    data = SeededDataset(Noise(), seed=3)
    in_order = [data[0, i] for i in range(5)]
    torch.rand(7), np.random.rand(7), random.random()
    assert [data[0, i] for i in (4, 2, 0)] == [in_order[i] for i in (4, 2, 0)]


def test_each_sample_has_its_own_draws() -> None:
    """Samples, epochs and seeds each draw other numbers, from all three sources."""
    drawn = [
        SeededDataset(Noise(), seed)[epoch, i]
        for seed in range(3)
        for epoch in range(3)
        for i in range(3)
    ]
    for source in (1, 2, 3):
        assert len({sample[source] for sample in drawn}) == 27


def test_a_sample_leaves_the_random_state_alone() -> None:
    """torch, numpy and random continue as if no sample had been drawn."""
    expected = float(torch.rand(())), float(np.random.rand()), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    SeededDataset(Noise(), seed=0)[0, 0]
    assert (float(torch.rand(())), float(np.random.rand()), random.random()) == expected


def test_the_random_state_survives_an_error() -> None:
    """A sample that fails leaves the random state unchanged too."""
    before = random.getstate()
    try:
        with random_numbers_of(0, 0, 0):
            raise KeyError
    except KeyError:
        assert random.getstate() == before


def test_contexts_may_end_in_any_order() -> None:
    """Two that overlap, of two threads or of a generator that was left,
    do not spoil those that come after them.
    """
    first, second = random_numbers_of(0, 0, 0), random_numbers_of(0, 0, 1)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None), second.__exit__(None, None, None)
    for _ in range(3):
        before = np.random.get_state()[1].tolist()
        with random_numbers_of(0, 0, 2), random_numbers_of(0, 0, 3):
            np.random.rand()
        assert np.random.get_state()[1].tolist() == before


def test_a_batch_is_its_samples() -> None:
    """A batch loaded at once holds the samples loaded one by one,
    and leaves the random state unchanged.
    """
    data = SeededDataset(Noise(), seed=3)
    one_by_one = [data[1, i] for i in range(4)]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert data.__getitems__([(1, i) for i in range(4)]) == one_by_one
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_sample_draws_from_its_seed_epoch_and_index() -> None:
    """Also in a batch that reaches from one epoch into the next, or that holds one sample twice."""
    keys = [(1, 8), (1, 9), (2, 0), (1, 8)]
    batch = SeededDataset(Noise(), seed=3).__getitems__(keys)
    for (epoch, index), sample in zip(keys, batch, strict=True):
        with random_numbers_of(3, epoch, index):
            assert Noise()[index] == sample


def test_what_holds_its_samples_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, parts of them and several of them are not seeded for each sample;
    anything of the user's is.
    """
    held = TensorDataset(torch.arange(6))
    quiet = [held, Subset(held, [5, 0]), ConcatDataset([held, Subset(held, [1])])]

    class Own(TensorDataset):
        """Might draw."""

    noisy: list[Any] = [
        Noise(),
        Subset(Noise(), [5, 0]),
        ConcatDataset([held, Noise()]),
        Own(torch.arange(6)),
        [1, 2],
    ]
    assert [may_draw(dataset) for dataset in quiet + noisy] == [False] * 3 + [True] * 5
    monkeypatch.delattr("trainkit.data.order._seed")
    assert [SeededDataset(dataset, 0)[3, 1] for dataset in quiet] == [(1,), (0,), (1,)]


def test_samples_within_samples_have_their_own_numbers() -> None:
    """A data set that loads samples from another one, or from a stream, continues its own draws."""
    inner, stream = SeededDataset(Noise(), seed=1), OwnRandomNumbers(5)

    class Outer(Noise):
        def __getitem__(self, index: int) -> Any:
            first = np.random.rand()
            drawn = inner[0, index]
            with stream():
                np.random.rand()
            return first, drawn, np.random.rand()

    first, drawn, second = SeededDataset(Outer(), seed=3)[0, 7]
    with random_numbers_of(3, 0, 7):
        assert [first, second] == np.random.rand(2).tolist()
    assert drawn == inner[0, 7]


def test_own_numbers_continue_where_they_were() -> None:
    """Drawn in parts, with other draws between, they are the numbers of a single draw;
    other generators do not change.
    """

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    at_once, in_parts = OwnRandomNumbers(5), OwnRandomNumbers(5)
    with at_once():
        expected = [draw(), draw()]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    others = [draw(), draw(), draw()]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    drawn, between = [], [draw()]
    for _ in range(2):
        with in_parts():
            drawn.append(draw())
        between.append(draw())
    assert drawn == expected
    assert between == others


def test_places_beyond_the_end_begin_again() -> None:
    """A step that is filled up takes the epoch's first samples;
    of a limited epoch the limit's end counts.
    """
    assert indices_at([5, 3, 4, 9], range(1, 3), 4) == [3, 4]
    assert indices_at([5, 3, 4, 9], range(2, 5), 3) == [4, 5, 3]
    assert indices_at(np.array([5, 3, 4]), range(1, 3), 3) == [3, 4]


class Draws(Dataset[Any]):
    """Draws from one generator, from sample `first` on, and counts how often it is read."""

    def __init__(self, draw: Callable[[], float] | None, first: int = 0, fails: int = -1) -> None:
        self.draw, self.first, self.fails = draw, first, fails
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> float:
        self.reads.append(index)
        if index == self.fails:
            raise OSError("broken")
        return self.draw() if self.draw is not None and index >= self.first else float(index)


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), np.random.rand, lambda: torch.rand(()).item()],
)
@pytest.mark.parametrize("first", [0, 9])
def test_samples_that_draw_have_their_own_numbers_from_the_first_on(
    draw: Callable[[], float], first: int
) -> None:
    """Whenever the first draw comes, whichever batches came before:
    the batch with it is read again, later ones once.
    """
    data = Draws(draw, first)
    seeded = SeededDataset(data, 5)
    batches = [
        seeded.__getitems__([(0, i) for i in range(start, start + 4)]) for start in range(0, 32, 4)
    ]
    alone = [SeededDataset(Draws(draw, first), 5)[0, index] for index in range(32)]
    assert [value for batch in batches for value in batch] == alone
    begins = first // 4 * 4
    assert data.reads == [*range(begins + 4), *range(begins, 32)]


def test_samples_that_draw_nothing_are_read_once() -> None:
    """And the process's own random numbers stay where they are, whichever way a batch is read."""
    for data in (
        Draws(None),
        Draws(np.random.rand),
        Draws(random.random, 2),
        Draws(None, fails=3),
        Draws(np.random.rand, fails=3),
    ):
        seed_everything(3)
        seeded = SeededDataset(data, 5)
        with contextlib.suppress(DataError):
            seeded.__getitems__([(0, i) for i in range(8)])
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        seed_everything(3)
        assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())
        if data.draw is None:
            assert data.reads == [*range(len(data.reads))]


class ReadAtOnce(Draws):
    """Reads several samples in one call, as the datasets library does."""

    def __getitems__(self, indices: list[int]) -> list[float]:
        self.calls = [*getattr(self, "calls", []), indices]
        return [self[index] for index in indices]


def test_samples_are_read_at_once_from_data_that_can() -> None:
    """As by torch's own loader; samples that draw are read one by one, each from its own seed."""
    data = ReadAtOnce(None)
    assert SeededDataset(data, 5).__getitems__([(0, i) for i in range(4)]) == [0.0, 1.0, 2.0, 3.0]
    assert data.calls == [[0, 1, 2, 3]]
    draws = ReadAtOnce(random.random)
    alone = [SeededDataset(Draws(random.random), 5)[0, index] for index in range(8)]
    seeded = SeededDataset(draws, 5)
    assert [
        *seeded.__getitems__([(0, i) for i in range(4)]),
        *seeded.__getitems__([(0, i) for i in range(4, 8)]),
    ] == alone
    assert len(draws.calls) == 1
