"""Shares of a round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.plan import StepPlan
from trainkit.data.shares import format_shares, parse_shares, samples_of


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 8))
def test_samples_of_shares_are_those_of_a_plan(shares: list[int], batch_size: int) -> None:
    """The plan's first round and this arithmetic agree, for even shares too."""
    ranks = len(shares)
    for chosen in (tuple(shares), None):
        plan = StepPlan(1000, batch_size, ranks, shares=chosen)
        samples = tuple(sum(map(len, plan.microbatches(0, rank))) for rank in range(ranks))
        assert samples_of(chosen, batch_size * ranks, ranks) == samples


def test_words_are_read_back() -> None:
    """As the contract of a checkpoint holds them."""
    assert [format_shares(shares) for shares in (None, [2, 2], [3, 1])] == ["even", "even", "3:1"]
    assert [parse_shares(text) for text in ("even", "3:1")] == [None, (3, 1)]
