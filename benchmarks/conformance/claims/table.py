"""The table that claims enter, and comparisons that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.conformance.cell import KILLED, Cell, FailsError, Outcome
from benchmarks.conformance.work import Fit

KINDS = ("resume", "means", "numerics", "faults", "security", "cost")
Program = Callable[[Cell], str]


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        name: as `--only` takes it.
        kind: one of KINDS.
        sentence: what holds.
        program: checks it, and returns the numbers; raises FailsError with them.
        ranks: the numbers of ranks that it is checked on.
        own: whether trainkit alone makes the claim. Another trainer that does otherwise does not
            fail: it never said that it would.
    """

    name: str
    kind: str
    sentence: str
    program: Program
    ranks: tuple[int, ...]
    own: bool


CLAIMS: dict[str, Claim] = {}


def claim(
    kind: str, ranks: tuple[int, ...] = (1,), own: bool = False
) -> Callable[[Program], Program]:
    """Enter a program, whose docstring is the sentence, as `kind: its-name`."""

    def enter(program: Program) -> Program:
        name = program.__name__.replace("_", "-")
        assert name not in CLAIMS and kind in KINDS and program.__doc__
        sentence = " ".join(program.__doc__.split())
        CLAIMS[name] = Claim(name, kind, sentence, program, ranks, own)
        return program

    return enter


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights; infinite if one is not a number."""
    assert one.keys() == other.keys() and one, (one.keys(), other.keys())
    largest = 0.0
    for name, value in one.items():
        apart = (value.double() - other[name].double()).abs().max().item()
        largest = max(largest, float("inf") if apart != apart else apart)
    return largest


def require_close(one: Outcome, other: Outcome, limit: float, what: str = "weights") -> str:
    """Compare rank 0's weights.

    Raises:
        FailsError: they differ by more than the limit.
    """
    apart = difference(one.first["weights"], other.first["weights"])
    if apart > limit:
        raise FailsError(f"{what} differ by {apart:.2g}")
    return f"{what} differ by {apart:.2g}" if apart else f"{what} equal"


def require_equal(value: Any, expected: Any, what: str) -> str:
    """Compare two values.

    Raises:
        FailsError: they differ.
    """
    if value != expected:
        raise FailsError(f"{what}: {_short(value)} in place of {_short(expected)}")
    return f"{what}: {_short(value)}"


def require_near(value: float, expected: float, what: str) -> str:
    """Compare two numbers, to the rounding of a mean in float32.

    Raises:
        FailsError: they differ.
    """
    if not abs(value - expected) <= 1e-5 * max(1.0, abs(expected)):
        raise FailsError(f"{what} {value:.6g} in place of {expected:.6g}")
    return f"{what} {value:.6g}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value[:12])) + (", ..." if len(value) > 12 else "") + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def times_seen(*outcomes: Outcome) -> Counter[int]:
    """Return how often each sample was trained on, by all ranks of all runs."""
    return Counter(
        i
        for outcome in outcomes
        for record in outcome.records
        for ids in record["seen"]
        for i in ids
    )


def interrupted(cell: Cell, fit: Fit, after: int = 5, **more: Any) -> tuple[Outcome, ...]:
    """Run a Fit whole, then killed after some updates, then resumed.

    Returns:
        The three runs.
    """
    whole = cell.fit(fit)
    stopped = cell.fit(replace(fit, kill_after=after))
    if set(stopped.codes) != {KILLED}:
        raise AssertionError(f"the run was not killed: {stopped.codes}\n{stopped.text[-2000:]}")
    resumed = cell.fit(replace(fit, resume=True), stopped, **more)
    return whole, stopped, resumed


def require_each_once(fit: Fit, *outcomes: Outcome) -> str:
    """Compare how often each sample was trained on with the number of epochs.

    Raises:
        FailsError: some were seen more often, or less.
    """
    seen = times_seen(*outcomes)
    more = sum(count > fit.epochs for count in seen.values())
    fewer = sum(seen[i] < fit.epochs for i in range(fit.rows))
    text = f"{more} of {fit.rows} samples too often, {fewer} too rarely"
    if more or fewer:
        raise FailsError(text)
    return text
