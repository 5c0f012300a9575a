"""Clocks of several hosts: the offset that barriers give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.extensions.timeline.traces.clocks import Alignment, Offset, offset

DELAYS = st.lists(st.tuples(*[st.integers(0, 5_000_000)] * 4), min_size=1, max_size=8)


@given(DELAYS, st.integers(-(10**15), 10**15))
def test_the_true_offset_is_within_the_bound(
    delays: list[tuple[int, int, int, int]], true: int
) -> None:
    """Whatever each rank waited before a barrier and after it."""
    first, other, now = [], [], 10**12
    for early_0, late_0, early_r, late_r in delays:
        came_0, came_r = now + early_0, now + early_r
        met = max(came_0, came_r)
        first.append((came_0, met + late_0))
        other.append((came_r - true, met + late_r - true))
        now = met + 10_000_000
    found = offset(first, other)
    assert found is not None
    assert abs(found.ns - true) <= found.error_ns
    narrowest = min(
        met_0 - came_0 + left - came
        for (came_0, met_0), (came, left) in zip(first, other, strict=True)
    )
    assert 2 * found.error_ns <= narrowest


def test_meetings_that_cannot_be_are_no_offset() -> None:
    """A clock that jumped between two barriers has no offset; nor has one without barriers."""
    assert offset([(0, 10), (100, 110)], [(0, 10), (500, 510)]) is None
    assert offset([], []) is None


def test_a_clock_that_drifts_is_followed() -> None:
    """Between start and end the offset changes evenly."""
    alignment = Alignment(Offset(1_000_000, 10_000, 0), Offset(3_000_000, 30_000, 10_000_000_000))
    assert alignment.to_rank_0(0) == pytest.approx(1000)
    assert alignment.to_rank_0(5_000_000) == pytest.approx(5_000_000 + 2000)
    assert alignment.error_us == 30
    assert Alignment().to_rank_0(123.0) == 123.0
