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


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    }


def lost_anchors(page: Path, text: str) -> list[str]:
    """Return the links of a page's text to headings that do not exist, on it or on others."""
    return [
        f"{target}#{anchor}"
        for target, anchor in re.findall(r"\]\(((?:[^)\s#]*\.md)?)#([\w-]+)\)", text)
        if anchor not in headings((page.parent / target).read_text() if target else text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    """A link into a page, or within one, names one of its headings."""
    assert lost_anchors(page, page.read_text()) == []


def test_an_anchor_that_is_lost_is_seen() -> None:
    """A heading in a block of code is none."""
    text = "# A page\n[a](#a-page) [b](#b) [c](README.md#more) [d](README.md#gone)\n```\n# B\n```\n"
    assert lost_anchors(ROOT / "SECURITY.md", text) == ["#b", "README.md#gone"]


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
