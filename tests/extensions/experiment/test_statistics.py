"""The paired and the unpaired interval, against values of the handbook's formulas."""

from __future__ import annotations

import math

import pytest
from scipy import stats  # type: ignore[import-untyped]

from trainkit.extensions.experiment.statistics import Interval, paired, unpaired

# Student's own data of 1908: hours of sleep gained by ten patients with two drugs.
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_students_own_example() -> None:
    """The mean is 1.58 hours; the 95 % interval, from 0.70 to 2.46, is that of t with 9 degrees."""
    one = paired(FIRST, SECOND)
    assert one.difference == pytest.approx(1.58)
    assert (one.low, one.high) == (pytest.approx(0.7001, abs=1e-4), pytest.approx(2.4599, abs=1e-4))
    assert one.verdict("max") == "b better" and one.verdict("min") == "a better"


def test_without_the_pairs_the_same_values_show_nothing() -> None:
    """Welch's interval of the same values reaches over 0: it takes the patients' spread as noise."""
    one = unpaired(FIRST, SECOND)
    assert one.difference == pytest.approx(1.58)
    assert one.degrees == pytest.approx(17.776, abs=1e-3)
    assert (one.low, one.high) == (
        pytest.approx(-0.2055, abs=1e-4),
        pytest.approx(3.3655, abs=1e-4),
    )
    assert one.verdict("max") == "no difference shown"


def test_the_verdicts_agree_with_scipys_tests() -> None:
    """An interval leaves 0 out where the test of the same name has p below 0.05."""
    for shift in (0.0, 0.3, 0.6, 1.5, 3.0):
        moved = [value + shift for value in SECOND]
        assert (paired(FIRST, moved).verdict("max") == "b better") == (
            stats.ttest_rel(FIRST, moved).pvalue < 0.05
        )
        assert (unpaired(FIRST, moved).verdict("max") == "b better") == (
            stats.ttest_ind(FIRST, moved, equal_var=False).pvalue < 0.05
        )


def test_one_seed_shows_nothing() -> None:
    """It has a difference, and no interval."""
    one = paired([1.0], [2.0])
    assert one.difference == 1.0 and math.isinf(one.half_width)
    assert one.verdict("max") == unpaired([1.0], [2.0]).verdict("max") == "no difference shown"


def test_equal_differences_have_an_interval_of_no_width() -> None:
    """A difference that is the same with each seed is shown; none at all is not."""
    assert paired([1.0, 2.0], [1.5, 2.5]).verdict("min") == "a better"
    assert paired([1.0, 2.0], [1.0, 2.0]).verdict("min") == "no difference shown"
    assert unpaired([1.0, 1.0], [1.0, 1.0]) == Interval(0.0, 0.0, 2)
