"""The Makefile runs all tests: each folder of tests belongs to a group, and `make test` runs each group."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = re.search(r"^test: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_each_folder_of_tests_belongs_to_a_group() -> None:
    """A folder that no group names would run nowhere."""
    assert GROUPS is not None
    text = (ROOT / "Makefile").read_text()
    recipes = [re.search(rf"^{group}: .*\n((?:\t.*\n)+)", text, re.MULTILINE) for group in GROUPS[1].split()]
    run = " ".join(found[1] for found in recipes if found is not None)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) >= 7
    assert {folder for folder in folders if f"tests/{folder}" not in run} == set()
