"""trainkit/extensions/language/mixture.py: an order that follows its weights, whatever reads it."""

from __future__ import annotations

import random

import pytest

from trainkit.extensions.language.mixture import Mixture, SourceTurns


def drawn_weights() -> list[list[float]]:
    """Return weights of all kinds: round, long, nearly nothing, of one source, of many."""
    draw = random.Random(0)
    kinds = (draw.random, lambda: draw.randint(1, 9), lambda: 10 ** draw.uniform(-4, 2))
    return [
        [float(f"{draw.choice(kinds)():.4g}") for _ in range(draw.randint(1, 9))] for _ in range(60)
    ]


def test_counts_follow_the_weights_within_one_sample() -> None:
    """After any number of turns each source has had less than one turn more or fewer than its share;
    and `at` knows how many it had.
    """
    for weights in drawn_weights():
        turns = SourceTurns(weights)
        counts = [0] * len(weights)
        for turn in range(800):
            source, before = turns.at(turn)
            assert before == counts[source]
            counts[source] += 1
            shares = [(turn + 1) * part / turns.period for part in turns.parts]
            assert all(abs(n - share) < 1 for n, share in zip(counts, shares, strict=True))


def test_turns_repeat_after_their_period() -> None:
    """Tenths have a period of ten, in which each source has exactly its share; so a turn far away
    is known at once.
    """
    turns = SourceTurns([0.7, 0.2, 0.1])
    assert (turns.parts, turns.period) == ([7, 2, 1], 10)
    first = [turns.at(turn)[0] for turn in range(10)]
    assert sorted(first) == [0] * 7 + [1] * 2 + [2]
    source, before = turns.at(10**15 + 3)
    assert source == first[3]
    assert before == 10**14 * turns.parts[source] + first[:3].count(source)


def test_no_sample_is_repeated_before_all_were_read() -> None:
    """Within a pass over a source all samples differ, also if it spans epochs; the next pass has
    another order.
    """
    mixture = Mixture([5, 40], [3, 1], epoch_size=32)
    whole = [index for epoch in range(5) for index in mixture.order_of(7, epoch)[:]]
    of_first = [index for index in whole if index < 5]
    assert len(of_first) == 120
    passes = [tuple(of_first[begin : begin + 5]) for begin in range(0, 120, 5)]
    assert {frozenset(one) for one in passes} == {frozenset(range(5))}
    assert len({*passes}) > 1
    of_second = [index for index in whole if index >= 5]
    assert sorted(of_second) == [*range(5, 45)]


def test_the_order_depends_on_seed_weights_and_place_alone() -> None:
    """Epochs of another length, read in another order or from the middle, have the same samples at
    the same places; another seed or weight has others.
    """
    sizes = [11, 23]
    long = Mixture(sizes, [0.6, 0.4], 60).order_of(1, 0)[:]
    short = Mixture(sizes, [0.6, 0.4], 20)
    for epoch in (2, 0, 1):
        order = short.order_of(1, epoch)
        backwards = [order[place] for place in reversed(range(20))]
        assert backwards[::-1] == long[epoch * 20 : epoch * 20 + 20] == order[:]
    assert Mixture(sizes, [0.6, 0.4], 60).order_of(2, 0)[:] != long
    assert Mixture(sizes, [0.5, 0.5], 60).order_of(1, 0)[:] != long


def test_a_source_of_weight_0_is_not_read() -> None:
    """It has no turn and no pass; an epoch is as long as all sources by default."""
    mixture = Mixture([4, 6], [0, 2])
    assert len(mixture) == 10
    assert min(mixture.order_of(0, 0)) == 4
    assert mixture.passes() == pytest.approx([0, 10 / 6])
    with pytest.raises(IndexError):
        mixture.order_of(0, 0)[10]
    assert sorted({*mixture}) == [4, 5, 6, 7, 8, 9]


def test_a_sample_that_is_read_twice_in_an_epoch_is_another_copy() -> None:
    """Its random numbers, as of masked tokens, are others then."""
    order = Mixture([3, 8], [1, 1], epoch_size=12).order_of(0, 1)
    places = range(len(order))
    assert len({*order}) < 12
    assert len({(order[place], order.copy_of(place)) for place in places}) == 12
