"""The tutorials and the migration pages run from top to bottom, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.pages import ROOT, prepare, run_page

PAGES = sorted(
    page.stem for start in ("tutorial_", "from_") for page in (ROOT / "docs").glob(f"{start}*.md")
)


@pytest.mark.parallel
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """A reader who types what the page says gets what it says."""
    assert len(PAGES) == 7
    prepare(tmp_path)
    assert run_page(ROOT / "docs" / f"{name}.md", tmp_path) > 0
