"""The page of promises: each test that it names exists, and so does each file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.helpers.pages import part

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "elastic.md"
TESTS = ROOT / "tests"


def missing(text: str) -> list[str]:
    """Return the `file::test` of a text that do not exist."""
    return [
        f"{file}::{test}"
        for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text)
        if test not in functions(file)
    ]


def functions(file: str) -> set[str]:
    """Return the functions of a file of the tests; none if there is no such file."""
    path = TESTS / file.removeprefix("tests/")
    if not path.exists():
        return set()
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_what_is_missing_is_seen() -> None:
    """A test that does not exist, and a file that does not, are found."""
    this = "`architecture/test_reliability_page.py::test_what_is_missing_is_seen`"
    assert missing(
        f"{this} `architecture/test_reliability_page.py::test_gone` `gone.py::test_it`"
    ) == [
        "architecture/test_reliability_page.py::test_gone",
        "gone.py::test_it",
    ]


def test_each_test_that_the_page_names_exists() -> None:
    """Each promise names a test, or the storm."""
    text = part(PAGE, "Reliability")
    assert missing(text) == []
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    promises = [row[2] for row in rows if len(row) == 5][1:]
    assert len(promises) >= 12
    assert all("::" in tested or "storm" in tested for tested in promises)
