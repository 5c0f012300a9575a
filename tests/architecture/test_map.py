"""The map in CONTRIBUTING.md is that of the rooms' own docstrings."""

from __future__ import annotations

from tests.architecture.map import PAGE, in_page, table


def test_the_map_is_that_of_the_house() -> None:
    """A room that is new, gone or says something else is in the page:
    `python -m tests.architecture.map` writes it.
    """
    assert in_page(PAGE.read_text()) == table()


def test_each_room_says_what_it_holds() -> None:
    """In one line of at most 140 characters."""
    rows = [row.split(" | ") for row in table().splitlines()[2:]]
    assert len(rows) >= 35
    assert [row for row in rows if not 10 <= len(row[2].removesuffix(" |")) <= 160] == []
