"""The difference of two outputs, and its tolerance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from trainkit.errors import TaskError
from trainkit.extensions.exporting.compare import difference_of, tolerance_of

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        (tensor([1.0, 2.0]), tensor([1.0, 2.5]), 0.5),
        (tensor([1, 2]), tensor([1, 5]), 3.0),
        (tensor([True]), tensor([False]), 1.0),
        (tensor([NAN, INF, -INF]), tensor([NAN, INF, -INF]), 0.0),
        (tensor([NAN]), tensor([1.0]), INF),
        (tensor([INF]), tensor([-INF]), INF),
        (tensor([INF]), tensor([1.0]), INF),
        (torch.zeros(0, 2), torch.zeros(0, 2), 0.0),
        (torch.zeros(2, 1), torch.zeros(2), INF),
        (tensor([1 + 1j]), tensor([1 + 2j]), 1.0),
        ((tensor([1.0]), {"a": tensor([2.0])}), [tensor([1.0]), tensor([4.0])], 2.0),
        (tensor([1.0]), (tensor([1.0]), tensor([1.0])), INF),
        (tensor([1.0]), (tensor([1.0]), None), 0.0),
    ],
)
def test_the_largest_difference(a: Any, b: Any, difference: float) -> None:
    """Equal numbers, infinities and NaNs differ by 0; other shapes, counts and NaNs by infinity;
    in both directions.
    """
    assert difference_of(a, b, "f") == difference
    assert difference_of(b, a, "f") == difference


@pytest.mark.parametrize(
    ("output", "words"),
    [("text", "f returned a str"), (None, "f returned no tensor"), ((), "no tensor")],
)
def test_an_answer_without_tensors_is_refused(output: Any, words: str) -> None:
    """An output that cannot be compared is reported with its owner and type."""
    with pytest.raises(TaskError, match=words):
        difference_of(tensor([1.0]), output, "f")


@pytest.mark.parametrize(
    ("output", "allowed"),
    [
        (tensor([0.5, -0.1]), 1e-4),
        (tensor([3.0, -200.0, INF, NAN]), 2e-2),
        (tensor([2.0], dtype=torch.float64), 2e-10),
        (tensor([1.0], dtype=torch.bfloat16), 2e-2),
        (tensor([7]), 0.0),
        ({"a": tensor([7]), "b": tensor([0.5])}, 1e-4),
        (torch.zeros(0), 1e-4),
    ],
)
def test_what_is_allowed_grows_with_the_numbers(output: Tensor, allowed: float) -> None:
    """Some digits of the largest finite number, by type; whole numbers must be equal."""
    assert tolerance_of(output) == pytest.approx(allowed)
