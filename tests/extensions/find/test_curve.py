"""The curve of a range test: where it falls most, its valley, and when a sweep ends."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from trainkit.extensions.find.curve import Divergence, LRCurve, rates_between, smoothed

LRS = rates_between(1e-6, 1.0, 61)


def usual(middle: float = 1e-3, rises: float = 0.1) -> LRCurve:
    """Return a loss that falls from 2 to 1, most steeply at `middle`, and rises from `rises` on."""
    fall = [2 - 1 / (1 + math.exp(-3 * math.log10(lr / middle))) for lr in LRS]
    return LRCurve(
        LRS,
        [loss + max(0.0, 4 * math.log10(lr / rises)) for loss, lr in zip(fall, LRS, strict=True)],
    )


def test_rates_rise_by_one_factor() -> None:
    """From the first to the last, both included."""
    assert LRS[0] == 1e-6 and LRS[-1] == pytest.approx(1.0) and len(LRS) == 61
    assert {round(after / before, 9) for before, after in pairwise(LRS)} == {round(10**0.1, 9)}


def test_smoothing_moves_no_point_along_the_axis() -> None:
    """A straight line stays where it is, but for its ends."""
    line = [float(i) for i in range(40)]
    assert smoothed(line)[2:-2] == line[2:-2]


@pytest.mark.parametrize("middle", [1e-4, 1e-3, 1e-2])
def test_the_steepest_descent_is_found(middle: float) -> None:
    """Within a step of the rate at which the curve was made to fall most."""
    assert usual(middle).suggestion() == pytest.approx(middle, rel=0.3)


def test_the_valley_is_between_the_start_of_the_fall_and_the_rise() -> None:
    """It is the middle of the falling part, by the logarithm of the rate."""
    valley = usual().valley()
    assert valley is not None and valley == pytest.approx(math.sqrt(1e-6 * 0.1), rel=0.8)


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    """Nor does a curve of a few points."""
    rising = LRCurve(LRS, [1 + lr for lr in LRS])
    assert rising.suggestion() is None and rising.valley() is None
    short = LRCurve(LRS[:4], [4.0, 3.0, 2.0, 1.0])
    assert short.suggestion() is None and short.valley() is None


def test_a_sweep_ends_when_the_loss_exceeds_its_best() -> None:
    """By the given multiple of it, or if it is not finite; without a threshold only then."""
    ends = Divergence(4.0)
    assert [ends.look(loss) for loss in (2.0, 1.0, 1.0, 1.5)] == [""] * 4
    assert "4 times its lowest" in ends.look(60.0)
    assert "not finite" in Divergence(4.0).look(math.nan)
    endless = Divergence(None)
    assert [endless.look(loss) for loss in (1.0, 1e9)] == ["", ""] and "not finite" in endless.look(
        math.inf
    )


def test_a_negative_loss_has_a_limit_too() -> None:
    """A log-likelihood that falls from 1 to -3 and stays diverges at neither."""
    ends = Divergence(4.0)
    assert not any(ends.look(loss) for loss in (1.0, 0.1, -0.5, -1.0, -2.0, -3.0, -3.1, -2.9))
    assert ends.look(40.0)
