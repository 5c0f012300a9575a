"""Errors that need more than their sentence: each has a name, and a part of errors.md with an
example and the remedy.

A part begins with its name as heading, and the pattern of its messages in a comment.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

_PAGE = Path(__file__).with_name("errors.md")


class Explained(NamedTuple):
    """A part of the page."""

    message: re.Pattern[str]
    text: str


@functools.cache
def explained() -> dict[str, Explained]:
    """Return the page's parts by name."""
    by_name = {}
    for part in _PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        name, _, text = part.partition("\n")
        comment = re.search(r"<!-- message: (.*) -->\n+", text)
        assert comment is not None, name
        by_name[name] = Explained(re.compile(comment[1]), text.replace(comment[0], "").strip())
    return by_name


def name_of(message: str) -> str | None:
    """Return the name of the error with this message; None if its sentence is all there is."""
    return next(
        (name for name, error in explained().items() if error.message.search(message)), None
    )
