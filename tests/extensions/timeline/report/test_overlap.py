"""The model of reductions that backward hides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.extensions.timeline.report.overlap import (
    Profile,
    ReductionCost,
    Ring,
    Summing,
    exposed_s,
    fit_link,
    ring_of,
    step_s,
)

LINK = ReductionCost(latency_s=0.001, bytes_per_s=1e9)
EARLY = Profile(((0.1, 1e6), (0.2, 1e6)), backward_s=1.0, other_s=0.5)


def test_sums_that_end_within_backward_cost_nothing() -> None:
    """They are hidden."""
    assert exposed_s(EARLY, LINK, Summing()) == 0.0
    assert step_s(EARLY, LINK, Summing()) == 1.5


def test_the_last_gradient_is_exposed() -> None:
    """It is ready when backward ends, so nothing hides its reduction."""
    profile = Profile(((1.0, 4e6),), backward_s=1.0, other_s=0.0)
    assert exposed_s(profile, LINK, Summing()) == pytest.approx(0.005)
    assert step_s(profile, LINK, Summing(), accumulate=4) == pytest.approx(1.0 + 0.005 / 4)


def test_sums_go_one_after_the_other() -> None:
    """A slow link is busy until long after backward."""
    profile = Profile(tuple((i / 10, 1e9) for i in range(10)), backward_s=1.0, other_s=0.0)
    assert exposed_s(profile, ReductionCost(0.0, 1e9), Summing()) == pytest.approx(9.0)


def test_horovod_looks_each_cycle() -> None:
    """A ready gradient waits for the next cycle, in the mean over its phases:
    25, 50, 75 or 100 ms after 0.1 s.
    """
    profile = Profile(((0.101, 1e6),), backward_s=0.101, other_s=0.0)
    exposed = exposed_s(profile, LINK, Summing(cycle_s=0.1, fusion_bytes=1e9))
    assert exposed == pytest.approx(0.1 + 0.0625 - 0.101 + 0.002)


def test_what_is_ready_together_is_fused() -> None:
    """One latency in place of ten; up to the threshold, and a copy is paid for."""
    ready = tuple((0.0, 1e5) for _ in range(10))
    profile = Profile(ready, backward_s=0.0, other_s=0.0)

    def fused(threshold: float, copy: float = 0.0) -> float:
        mean_wait = 0.375e-5
        summing = Summing(cycle_s=1e-5, fusion_bytes=threshold, copy_s_per_byte=copy)
        return exposed_s(profile, LINK, summing) - mean_wait

    assert fused(1e9) == pytest.approx(0.001 + 0.001)
    assert fused(0) == pytest.approx(0.010 + 0.001)
    assert fused(2e5) == pytest.approx(0.005 + 0.001)
    assert fused(1e9, copy=1e-9) == pytest.approx(0.003)


READY = st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e8)), min_size=1, max_size=40)


@given(READY, st.floats(0, 0.05), st.floats(1e6, 1e11), st.floats(0, 0.05), st.floats(0, 1e9))
def test_the_model_keeps_to_what_must_hold(
    ready: list[tuple[float, float]], latency: float, bandwidth: float, cycle: float, fusion: float
) -> None:
    """No reduction ends too early, and all of them take no longer than one by one after backward,
    cycles included.
    """
    profile = Profile(tuple(sorted(ready)), backward_s=1.0, other_s=0.0)
    link = ReductionCost(latency, bandwidth)
    exposed = exposed_s(profile, link, Summing(cycle, fusion))
    last = max(at for at, _ in ready)
    total = sum(size for _, size in ready) / bandwidth
    assert exposed >= max(0.0, last + latency - 1.0) - 1e-9
    assert (
        exposed <= last - 1.0 + (latency + cycle) * len(ready) + total + cycle + 1e-9
        or exposed == 0.0
    )


@given(READY, st.floats(1e6, 1e11))
def test_fewer_bytes_never_cost_more(ready: list[tuple[float, float]], bandwidth: float) -> None:
    """Without cycles and fusion, in which a change may move a tensor into another buffer."""
    profile = Profile(tuple(sorted(ready)), backward_s=1.0, other_s=0.0)
    link = ReductionCost(1e-4, bandwidth)
    assert (
        exposed_s(profile.compressed(0.5), link, Summing())
        <= exposed_s(profile, link, Summing()) + 1e-12
    )


@given(st.floats(1e-6, 0.01), st.floats(1e6, 1e12), st.integers(2, 512))
def test_a_ring_gives_back_the_link_it_was_fitted_to(
    latency: float, bandwidth: float, ranks: int
) -> None:
    """And at other numbers of ranks it costs what the formula gives."""
    ring = ring_of(ReductionCost(latency, bandwidth), ranks)
    again = ring.link(ranks)
    assert math.isclose(again.latency_s, latency) and math.isclose(again.bytes_per_s, bandwidth)
    other = Ring(1e-5, 1e9).link(4)
    assert other.seconds(1e6) == pytest.approx(2 * 3 * 1e-5 + 2 * 3 / 4 * 1e6 / 1e9)
    assert Ring(1e-5, 1e9).link(1).seconds(1e9) == 0.0


@given(st.floats(1e-5, 0.01), st.floats(1e7, 1e11))
def test_a_link_is_found_again(latency: float, bandwidth: float) -> None:
    """From reductions of several sizes, one in ten of them delayed."""
    sizes = [1e3 * 2**i for i in range(16)] * 3
    sums = [
        (size, latency + size / bandwidth + (5.0 if i % 10 == 0 else 0.0))
        for i, size in enumerate(sizes)
    ]
    found = fit_link(sums)
    assert found is not None
    assert found.seconds(1e6) == pytest.approx(latency + 1e6 / bandwidth, rel=0.05)


@pytest.mark.parametrize(
    "sums",
    [
        [],
        [(1e6, 0.1), (1e6, 0.2)],  # one size
        [(4, 0.0001), (68, 0.0004)],  # small ones
        [(1e6, 0.1), (2e6, 0.2)],  # too alike
        [(1e3, 0.2), (1e5, 0.1), (1e6, 0.05)],  # larger ones are faster: something else decides
        # scatter hides the slope
        [(1e3 * 2**i, 0.01 * (-1) ** i + 0.02 + 1e-12 * 2**i) for i in range(12)],
    ],
)
def test_sums_that_tell_no_bandwidth_give_none(sums: list[tuple[float, float]]) -> None:
    """No bandwidth is better than a meaningless one."""
    assert fit_link(sums) is None
