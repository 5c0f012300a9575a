"""The tutorials and the migration pages run from top to bottom, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.page_tests import DOCS, TUTORIALS, parts_of
from tests.helpers.pages import prepare, run_page


@pytest.mark.parallel
@pytest.mark.parametrize(("name", "title"), parts_of(TUTORIALS))
def test_a_tutorial_runs_from_top_to_bottom(name: str, title: str, tmp_path: Path) -> None:
    """A reader who types what the page says gets what it says."""
    prepare(tmp_path)
    assert run_page(DOCS / f"{name}.md", tmp_path, title=title) > 0
