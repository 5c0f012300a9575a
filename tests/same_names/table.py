"""The table of behaviours: what each does in both trainers, and what the page says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.same_names.kit import Framework

Behaviour = Callable[[Framework], Any]


class Row(NamedTuple):
    """A behaviour and its verdict.

    Attributes:
        name: as the page has it.
        run: does it, and returns what can be compared.
        verdict: "equal", "refused" (trainkit raises a sentence that has `text`) or "differs"
            (`text` says why).
        text: see verdict.
    """

    name: str
    run: Behaviour
    verdict: str
    text: str = ""


ROWS: list[Row] = []
ROWS_OF_RANKS: list[Row] = []  # of scripts on two ranks


def equal(run: Behaviour, table: list[Row] = ROWS) -> Behaviour:
    """Both trainers return the same."""
    return _add(run, "equal", "", table)


def refused(text: str, table: list[Row] = ROWS) -> Callable[[Behaviour], Behaviour]:
    """Return a decorator: Lightning runs it,
    and trainkit refuses it in a sentence that has the text.
    """
    return lambda run: _add(run, "refused", text, table)


def differs(text: str, table: list[Row] = ROWS) -> Callable[[Behaviour], Behaviour]:
    """Return a decorator: both run it, with other results, for the reason that the page gives."""
    return lambda run: _add(run, "differs", text, table)


def _add(run: Behaviour, verdict: str, text: str, table: list[Row]) -> Behaviour:
    table.append(Row(" ".join((run.__doc__ or "").split()).rstrip("."), run, verdict, text))
    return run
