"""StepPlan: every sample once, steps of the same samples however they are split."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.plan import StepPlan

plans = st.builds(
    StepPlan,
    num_samples=st.integers(0, 120),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    drop_last=st.booleans(),
)


def cells(plan: StepPlan, step: int) -> list[list[range]]:
    """Return the microbatches of each rank."""
    return [plan.microbatches(step, rank) for rank in range(plan.world_size)]


def places(plan: StepPlan, step: int) -> list[int]:
    """Return the places of a step on all ranks, sorted."""
    return sorted(i for rank in cells(plan, step) for micro in rank for i in micro)


def test_shares_are_those_of_a_round() -> None:
    """Two rounds of 8 samples at 3:1, and a short last step;
    steps keep their samples and their order.
    """
    plan = StepPlan(20, 4, 2, 2, shares=(3, 1))
    assert cells(plan, 0) == [[range(6), range(8, 14)], [range(6, 8), range(14, 16)]]
    assert cells(plan, 1) == [[range(16, 19)], [range(19, 20)]]
    assert cells(replace(plan, num_samples=17), 1) == [[], [range(16, 17)]]
    assert cells(replace(plan, num_samples=17, even=True), 1) == [[range(16, 16)], [range(16, 17)]]


@given(plans, st.lists(st.integers(1, 5), min_size=5, max_size=5), st.booleans())
def test_every_sample_is_in_one_share(plan: StepPlan, shares: list[int], even: bool) -> None:
    """A step has the samples that it has without them, and each rank its part,
    within a sample a round.
    """
    uneven = replace(plan, shares=tuple(shares[: plan.world_size]), even=even)
    for step in range(plan.num_steps):
        assert places(uneven, step) == places(plan, step)
        rounds = -(-plan.samples_in(step) // (plan.batch_size * plan.world_size))
        for rank, own in enumerate(cells(uneven, step)):
            part = plan.samples_in(step) * shares[rank] / sum(uneven.shares or ())
            assert abs(sum(map(len, own)) - part) <= rounds
            assert len(own) == rounds if even else all(own)


@given(plans)
def test_every_sample_is_given_once(plan: StepPlan) -> None:
    """Over ranks, microbatches and steps each place comes exactly once;
    drop_last leaves out less than a step.
    """
    taken = [i for step in range(plan.num_steps) for i in places(plan, step)]
    assert taken == list(range(len(taken)))
    missing = plan.num_samples - len(taken)
    assert missing == 0 or (plan.drop_last and missing < plan.global_batch_size)


@given(plans)
def test_a_step_takes_the_next_samples_of_the_order(plan: StepPlan) -> None:
    """Step s takes the s'th global batch of the order, for any split."""
    for step in range(plan.num_steps):
        start = step * plan.global_batch_size
        assert places(plan, step) == list(range(start, start + plan.samples_in(step)))


@given(plans)
def test_a_full_step_has_contiguous_cells(plan: StepPlan) -> None:
    """In a full step, cell micro * world_size + rank takes the cell'th chunk of batch_size."""
    for step in range(plan.num_samples // plan.global_batch_size):
        for rank, micros in enumerate(cells(plan, step)):
            start = step * plan.global_batch_size
            firsts = [
                start + (m * plan.world_size + rank) * plan.batch_size
                for m in range(plan.accumulate)
            ]
            assert micros == [range(first, first + plan.batch_size) for first in firsts]


@given(plans)
def test_a_short_step_is_spread_evenly(plan: StepPlan) -> None:
    """In a short step no microbatch is empty or too large, sizes differ by one at most,
    and no round is wasted.
    """
    if plan.drop_last or not plan.num_samples % plan.global_batch_size:
        return
    ranks = cells(plan, plan.num_steps - 1)
    sizes = [len(micro) for micros in ranks for micro in micros]
    one_round = plan.batch_size * plan.world_size
    assert 1 <= min(sizes) <= max(sizes) <= plan.batch_size
    assert max(sizes) - min(sizes) <= 1
    assert max(len(micros) for micros in ranks) == -(
        -plan.samples_in(plan.num_steps - 1) // one_round
    )


@given(plans, st.integers(1, 3))
def test_ranks_and_accumulation_are_exchangeable(plan: StepPlan, factor: int) -> None:
    """One rank with k times the accumulation goes through the same cells as k ranks."""
    many = StepPlan(plan.num_samples, plan.batch_size, factor, plan.accumulate, plan.drop_last)
    one = StepPlan(plan.num_samples, plan.batch_size, 1, plan.accumulate * factor, plan.drop_last)
    assert many.num_steps == one.num_steps
    for step in range(plan.num_samples // many.global_batch_size):
        of_ranks = cells(many, step)
        in_turn = [
            of_ranks[rank][micro] for micro in range(plan.accumulate) for rank in range(factor)
        ]
        assert in_turn == one.microbatches(step, 0)


def test_a_rank_may_have_no_sample() -> None:
    """If a last step has fewer samples than ranks, the last ranks get no microbatch."""
    plan = StepPlan(num_samples=13, batch_size=4, world_size=3)
    assert cells(plan, 1) == [[range(12, 13)], [], []]


def test_steps_are_counted() -> None:
    """A short last step counts, save with drop_last."""
    assert StepPlan(17, 4, 2).num_steps == 3
    assert StepPlan(17, 4, 2, drop_last=True).num_steps == 2
    assert StepPlan(0, 4).num_steps == 0


@given(plans)
def test_even_plans_give_all_ranks_as_many_microbatches(plan: StepPlan) -> None:
    """A rank without samples borrows: empty ranges, which read a sample of the same step.
    The samples stay the same.
    """
    even = replace(plan, even=True)
    for step in range(plan.num_steps):
        assert places(even, step) == places(plan, step)
        assert len({len(rank) for rank in cells(even, step)}) == 1
        for rank in cells(even, step):
            for micro in rank:
                read = even.reads(step, micro)
                assert (
                    read == micro if micro else len(read) == 1 and read.start in places(plan, step)
                )
