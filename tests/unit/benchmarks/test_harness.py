"""What all benchmarks share: turns, medians, and how figures are shown."""

from __future__ import annotations

import pytest

from benchmarks.harness import Findings, Table, Target, median, median_ratio, shown, take_turns


def test_contenders_take_turns() -> None:
    """Another one is first in each round; the first round, which warms up, does not count."""
    order: list[str] = []

    def contender(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    taken = take_turns({name: lambda name=name: contender(name) for name in "abc"}, rounds=2)
    assert "".join(order) == "abcbcacab"
    assert taken == {"a": [[6.0], [8.0]], "b": [[4.0], [9.0]], "c": [[5.0], [7.0]]}


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is slow in a round is so for all:
    the ratio is taken within rounds, and then the median.
    """
    base, twice = [[1.0, 1.0], [10.0], [3.0]], [[2.0, 2.0], [20.0], [9.0]]
    assert median_ratio(twice, base) == 2.0
    assert median(base) == 2.0


@pytest.mark.parametrize(
    ("bound", "met"), [("at most", [True, True, False]), ("at least", [False, True, True])]
)
def test_a_target_is_reached_or_not(bound: str, met: list[bool]) -> None:
    """The bound itself reaches it; the JSON says so."""
    targets = [Target("it", measured, 2.0, "ms", bound) for measured in (1.0, 2.0, 3.0)]  # type: ignore[arg-type]
    assert [target["met"] for target in Findings(targets=targets).as_json()["targets"]] == met


def test_a_row_has_a_cell_for_each_column() -> None:
    """A table that would be crooked is none."""
    with pytest.raises(AssertionError):
        Table("it", ["", "ms"], [["a"]])


def test_figures_have_three_digits() -> None:
    """Enough to compare, no more; counts are whole."""
    cells = (0.012345, 1.2345, 12.345, 123.45, 1234.5, 7, 1234567, None, "x")
    assert [shown(cell) for cell in cells] == [
        "0.0123",
        "1.23",
        "12.3",
        "123",
        "1,234",
        "7",
        "1,234,567",
        "-",
        "x",
    ]
