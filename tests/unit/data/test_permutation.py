"""The permutation of very many samples:
each number once, in an order of the seed, in little memory.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data import order
from trainkit.data.permutation import Permutation


@given(st.integers(1, 9_000), st.integers(0, 2**63 - 1))
def test_each_number_comes_once(length: int, seed: int) -> None:
    """For any length, a power of two or not, longer than a block computed at once or not."""
    assert sorted(Permutation(length, seed)[:]) == list(range(length))


def test_all_orders_come_about_equally_often() -> None:
    """Of 4 numbers there are 24 orders;
    24,000 seeds give each 1,000 times, within 5 standard deviations.
    """
    counts = Counter(tuple(Permutation(4, seed)[:]) for seed in range(24_000))
    assert len(counts) == 24
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 1000**0.5


def test_neighbours_are_strangers() -> None:
    """Places side by side have numbers all over the range:
    half of the neighbours rise, and steps are as long as they come.
    """
    numbers = Permutation(10**9, 7)[:20_000]
    rises = sum(a < b for a, b in itertools.pairwise(numbers))
    mean_step = sum(abs(a - b) for a, b in itertools.pairwise(numbers)) / len(numbers)
    assert abs(rises - 10_000) < 500
    assert abs(mean_step / 10**9 - 1 / 3) < 0.02


def test_a_place_is_read_alone_or_in_a_slice() -> None:
    """Slices and single places agree in any order of asking; beyond the end there is nothing."""
    numbers = Permutation(10_000, 3)
    ends = [numbers[i] for i in (9_999, 0, 5_000)]
    assert ends == [numbers[9_999:][0], numbers[:1][0], numbers[5_000:5_001][0]]
    with pytest.raises(IndexError):
        numbers[10_000]


def test_an_epoch_of_very_many_samples_is_not_held() -> None:
    """1e12 samples: the first, the last and those between are there at once,
    in less than a megabyte.
    """
    tracemalloc.start()
    epoch = order.epoch_order(10**12, True, 0, 0, None)
    found = order.indices_at(epoch, range(10**12 - 2, 10**12), 10**12) + order.indices_at(
        epoch, range(3), 10**12
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found)) == 5
    assert peak < 2**20


def test_seeds_and_epochs_differ() -> None:
    """As the orders of small epochs do."""
    firsts = {
        tuple(order.epoch_order(10**9, True, seed, epoch, None)[:4])
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(firsts) == 16
