"""Shares by pace: exact sums within limits, in proportion to measured speed,
and at rest where all ranks compute as long.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.shares import samples_of
from trainkit.extensions.balance.paces import Pace, propose, spread


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.data())
def test_samples_are_spread_within_the_limits(weights: list[float], data: st.DataObject) -> None:
    """The sum is exact, each rank has one sample at least and its limit at most;
    without limits the rest is proportion.
    """
    ranks = len(weights)
    total = data.draw(st.integers(ranks, 200))
    limits = data.draw(st.lists(st.integers(1, 200), min_size=ranks, max_size=ranks))
    if sum(limits) < total:
        limits = [limit + total for limit in limits]
    samples = spread(weights, total, limits)
    assert sum(samples) == total
    assert all(1 <= part <= limit for part, limit in zip(samples, limits, strict=True))
    exact = [total * weight / sum(weights) for weight in weights]
    if all(1 <= part <= limit for part, limit in zip(exact, limits, strict=True)):
        assert all(abs(part - own) < 1 for part, own in zip(samples, exact, strict=True))


def test_a_capped_rank_leaves_others_their_one_sample() -> None:
    """A cap frees less than the ranks below one sample need:
    these are raised first, and the sum stays exact.
    """
    assert spread([1, 3, 1, 1, 1, 1], 6, [1, 2, 1, 1, 1, 1]) == (1, 1, 1, 1, 1, 1)
    assert spread([1, 100, 1], 10, [9, 7, 9]) == (2, 7, 1)


def test_what_a_limit_takes_goes_to_the_others() -> None:
    """In proportion to their speed."""
    assert spread([6, 2, 1], 90, [90, 90, 90]) == (60, 20, 10)
    assert spread([6, 2, 1], 90, [48, 90, 90]) == (48, 28, 14)
    assert spread([1, 1], 5, [9, 9]) == (3, 2)


def paces(
    now: tuple[int, ...], sample_s: list[float], fixed_s: float = 0.0, rest_s: float = 0.0
) -> list[Pace]:
    """Return what ranks measure in a step at these shares."""
    return [Pace(n, fixed_s + n * s, rest_s) for n, s in zip(now, sample_s, strict=True)]


def test_a_proposal_goes_most_of_the_way_to_equal_times() -> None:
    """A rank three times slower: the best shares are 3:1, twice as fast;
    a quarter of the old shares stays.
    """
    proposal = propose(paces((16, 16), [1.0, 3.0]), (16, 16), [32, 32], damping=0.25)
    assert proposal.gain == pytest.approx(1.0)
    assert proposal.samples == (22, 10)
    assert propose(paces((16, 16), [1.0, 3.0]), (16, 16), [32, 32], damping=0).samples == (24, 8)


def test_the_gain_is_of_a_whole_step_and_within_the_limits() -> None:
    """What a step takes beside computing does not shrink;
    nor does the part that no rank has memory for.
    """
    now = (16, 16)
    assert propose(paces(now, [1.0, 3.0], rest_s=48.0), now, [32, 32], 0).gain == pytest.approx(
        96 / 72 - 1
    )
    held = propose(paces(now, [1.0, 3.0]), now, [20, 20], 0)
    assert held.samples == (20, 12) and held.gain == pytest.approx(48 / 36 - 1)


@given(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=4), st.floats(0.0, 20.0))
def test_shares_come_to_rest_where_all_compute_as_long(
    sample_s: list[float], fixed_s: float
) -> None:
    """Also if each microbatch has a fixed cost:
    after some changes the times differ by about a sample, or the gain is small.
    """
    total, ranks = 400, len(sample_s)
    now = samples_of(None, total, ranks)
    for _ in range(30):
        now = propose(paces(now, sample_s, fixed_s), now, [total] * ranks, 0.25).samples
    times = [fixed_s + n * s for n, s in zip(now, sample_s, strict=True)]
    assert max(times) - min(times) <= 2.5 * max(sample_s)
