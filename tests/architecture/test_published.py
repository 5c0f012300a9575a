"""What a reader or a package index gets:
links that lead somewhere, one version, pinned and hashed requirements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.version import __version__

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "trainkit" / "cli" / "explained" / "errors.md",
    ROOT / ".github" / "pull_request_template.md",
]


def links(page: Path) -> Iterator[str]:
    """Yield the links of a page to files, without their anchors; code blocks hold none."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """As GitHub shows the page, relative to its folder."""
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_links_are_seen() -> None:
    """The test above looks at something."""
    assert len(PAGES) > 40 and len(list(links(ROOT / "README.md"))) > 20


def test_anchors_are_headings() -> None:
    """A link into a page names one of its headings."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)\s#]*\.md)#([\w-]+)\)", page.read_text()):
            text = (page.parent / target).read_text()
            headings = {
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            }
            assert anchor in headings, f"{page.name}: {target}#{anchor}"


def test_there_is_one_version() -> None:
    """CITATION.cff has that of version.py, and the changelog's next part is open or is of it."""
    assert re.search(
        rf"^version: {re.escape(__version__)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
    )
    assert re.search(
        r"^## \[(Unreleased|" + re.escape(__version__) + r")\]",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert "version = " not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]


def entries_of(name: str) -> list[str]:
    """Return the pins of a set of requirements, with their hashes."""
    return re.split(r"\n(?=[A-Za-z])", (ROOT / name).read_text())[1:]


@pytest.mark.parametrize(
    ("name", "fewest", "most"), [("requirements.txt", 20, 80), ("requirements-dev.txt", 200, 500)]
)
def test_each_requirement_is_pinned_and_hashed(name: str, fewest: int, most: int) -> None:
    """pip then installs the files that were tested, or nothing; training needs few."""
    entries = entries_of(name)
    assert fewest < len(entries) < most
    for entry in entries:
        assert re.match(r"[\w.\[\],-]+==\S+", entry), entry.splitlines()[0]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]


def test_training_has_the_versions_that_the_tests_ran_with() -> None:
    """requirements.txt, the smaller set, is a part of requirements-dev.txt."""
    small, large = (
        {entry.split()[0] for entry in entries_of(name)}
        for name in ("requirements.txt", "requirements-dev.txt")
    )
    assert small < large
    assert not {entry.partition("==")[0] for entry in small} & {
        "ray",
        "lightning",
        "transformers",
        "mlflow",
        "sphinx",
    }
