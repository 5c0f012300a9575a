"""ShardOrder: each sample once, kind to shards, and what it says of its shuffle."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.data.plan import StepPlan
from trainkit.errors import ConfigError
from trainkit.extensions.shards.index import Index, Shard
from trainkit.extensions.shards.order import ShardOrder


def index_of(*counts: int, classes: int = 0) -> Index:
    """Return shards with so many samples."""
    return Index(
        tuple(Shard(f"{i}.tar", count, 1, classes=classes) for i, count in enumerate(counts))
    )


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_each_sample_once(counts: list[int], window: int, lanes: int, turn: int, seed: int) -> None:
    """For all shards, windows, lanes and turns, shorter than the data or not;
    from any place on the order is the same.
    """
    lanes = min(lanes, len(counts))
    index = index_of(*counts)
    whole = ShardOrder(index, window, lanes, turn).order_of(seed, 1)[:]
    assert sorted(whole) == list(range(sum(counts)))
    late = ShardOrder(index, window, lanes, turn).order_of(seed, 1)
    start = sum(counts) // 2
    assert late[start : start + 3] == whole[start : start + 3]


def test_epochs_and_seeds_differ() -> None:
    """And nothing else changes the order."""
    order = ShardOrder(index_of(*[9] * 8), 2)
    found = {tuple(order.order_of(seed, epoch)[:]) for seed in (0, 1) for epoch in (0, 1)}
    assert len(found) == 4
    assert order.order_of(0, 1)[:] == ShardOrder(index_of(*[9] * 8), 2).order_of(0, 1)[:]


def test_a_window_is_read_before_the_next_one() -> None:
    """With windows of 2 shards each run of 20 samples is of 2 shards, mixed;
    the next ones are asked for ahead.
    """
    asked: list[list[int]] = []
    index = index_of(*[10] * 8)
    order = ShardOrder(index, 2, ahead=asked.append).order_of(0, 0)
    shards = [index.locate(i)[0] for i in order[0:80]]
    for start in range(0, 80, 20):
        run = shards[start : start + 20]
        assert len({*run}) == 2 and run != sorted(run) and run != sorted(run, reverse=True)
    assert {*shards[20:40]} <= {*asked[0]} and len(asked) == 4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_their_lanes_alone(ranks: int) -> None:
    """With 4 lanes a rank reads about its part of the shards, accumulated microbatches included;
    the steps are the same.
    """
    index = index_of(*[12] * 16)
    order = ShardOrder(index, 2, 4, turn=2).order_of(0, 0)
    plan = StepPlan(index.num_samples, batch_size=2, world_size=ranks, accumulate=8 // ranks)
    for rank in range(ranks):
        places = itertools.chain(
            *(part for step in range(plan.num_steps) for part in plan.microbatches(step, rank))
        )
        read = {index.locate(order[place])[0] for place in places}
        assert len(read) <= 16 // ranks + 1


def test_it_says_how_well_it_shuffles() -> None:
    """A window of all shards is as good as any; a small one is compared;
    sorted shards are found.
    """
    assert "as good as a shuffle of all samples" in ShardOrder(index_of(5, 5, 5), 16).describe(8)
    text = ShardOrder(index_of(*[100] * 64, classes=50), 8).describe(32)
    assert (
        "8 of 64 shards at a time; a batch of 32 has samples of 8 shards (a shuffle of all"
        " samples: 25)" in text
    )
    assert "of one shard 8.0 times as often" in text and "sorted" not in text
    sorted_text = ShardOrder(
        Index(index_of(*[100] * 64, classes=1).shards, tuple("abcdefgh")), 8
    ).describe(32)
    assert "Its shards are sorted: one holds 1.0 classes, of 8 if they were mixed" in sorted_text


def test_there_are_no_more_lanes_than_shards() -> None:
    """The error names both numbers."""
    with pytest.raises(
        ConfigError, match=r"data\.lanes is 4, but there are 2 shards; it must be 2 or less"
    ):
        ShardOrder(index_of(1, 2), lanes=4)
