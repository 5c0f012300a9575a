"""check-resume compares, besides checkpoints, logged values and the samples of each step."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.extensions.check_resume.report import logged_values, samples


def table(*losses: str, **more: list[str]) -> list[dict[str, str]]:
    """Return rows of steps 1, 2, ..., each with its loss and more columns."""
    return [
        {"step": str(step), "loss": loss}
        | {name: column[step - 1] for name, column in more.items()}
        for step, loss in enumerate(losses, 1)
    ]


def test_logged_values_are_compared_as_text() -> None:
    """Values equal as numbers but not as text are reported as different, with row,
    step and column.
    """
    part = logged_values(table("0.5", "0.25"), table("0.5", "0.250"), 1, False)
    assert part.first == "row 2 (step 2), loss: '0.25' and '0.250'"
    assert logged_values(table("0.5", "0.25"), table("0.5", "0.25"), 1, False).first is None


@pytest.mark.parametrize("losses", [("0.5",), ("0.5", "0.2", "0.2")])
def test_rows_too_few_or_too_many_are_refused(losses: tuple[str, ...]) -> None:
    """A row that was lost, or written twice, is a difference."""
    assert (
        logged_values(table("0.5", "0.2"), table(*losses), 1, False).first
        == f"2 rows and {len(losses)} rows"
    )


def test_a_column_of_times_is_passed_over_and_named() -> None:
    """A column that differs before the kill holds times and is skipped with a note;
    one that differs later is not.
    """
    part = logged_values(
        table("1", "2", time=["7", "8"]), table("1", "2", time=["9", "9"]), 1, False
    )
    assert (part.first, part.left_out) == (None, "without time, which differ before the kill too")
    later = logged_values(
        table("1", "2", time=["7", "8"]), table("1", "2", time=["7", "9"]), 1, False
    )
    assert later.first == "row 2 (step 2), time: '8' and '9'"


def notes(*steps: tuple[int, list[int] | None, list[str]]) -> list[dict[str, Any]]:
    """Return a rank's record."""
    return [{"step": step, "indices": indices, "samples": data} for step, indices, data in steps]


WHOLE = [
    notes((1, [4], ["e"]), (2, [0, 1], ["a", "b"])),
    notes((1, [5], ["f"]), (2, [2, 3], ["c", "d"])),
]


@pytest.mark.parametrize(
    ("second", "first"),
    [
        (notes((2, [2, 3], ["c", "d"])), None),
        (
            notes((2, [3, 2], ["d", "c"])),
            "step 2 of rank 1: indices [2, 3]... and [3, 2]..., from place 0 on",
        ),
        (
            notes((2, [2, 3], ["c", "D"])),
            "step 2 of rank 1: the same indices, and other data (augmentation?) in 1 of 2",
        ),
        (notes(), "step 2: of 2 ranks and of 1"),
    ],
)
def test_each_rank_must_train_on_the_same_samples(
    second: list[dict[str, Any]], first: str | None
) -> None:
    """Steps after the kill are compared rank by rank:
    other indices, other data and a missing record are reported.
    """
    assert samples(WHOLE, [notes((2, [0, 1], ["a", "b"])), second], False).first == first


@pytest.mark.parametrize(("indices", "is_equal"), [([3, 1, 0, 2], True), ([3, 1, 0, 0], False)])
def test_at_other_ranks_a_step_has_the_same_samples_as_a_set(
    indices: list[int], is_equal: bool
) -> None:
    """One rank may train on the samples of two, in any order, each once."""
    part = samples(WHOLE, [notes((2, indices, ["d", "b", "a", "c"]))], True)
    assert (part.first is None) is is_equal


def test_a_run_that_trained_nothing_more_is_no_success() -> None:
    """Without records nothing counts as equal."""
    assert samples(WHOLE, [[], []], False).first == "the resumed run trained no step"
