"""Nothing is said twice: what two pages need is on one, and the other leads there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN = {"conformance.md", "lightning.md"}  # by programs
PAGES = [
    ROOT / "README.md",
    ROOT / "trainkit" / "cli" / "explained" / "errors.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in WRITTEN),
]
MOST_WORDS = 12  # of the same text in two places


def said_twice(texts: Mapping[str, str]) -> set[tuple[str, ...]]:
    """Return the pages that share more than MOST_WORDS words in a row of their prose or tables, and
    the words; code blocks do not count.
    """
    places = defaultdict(list)
    for name, text in texts.items():
        prose = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
        prose = re.sub(r"\]\([^)]*\)", "]", prose)
        for paragraph in re.split(r"\n\n|\n(?=[|#-])", prose):
            words = re.findall(r"[\w'=./-]+", paragraph.lower())
            for i in range(len(words) - MOST_WORDS):
                places[tuple(words[i : i + MOST_WORDS + 1])].append(name)
    return {(*sorted(set(names)), " ".join(run)) for run, names in places.items() if len(names) > 1}


def test_no_text_is_on_two_pages() -> None:
    """Nor twice on one."""
    assert len(PAGES) > 30
    assert said_twice({page.name: page.read_text() for page in PAGES}) == set()


def test_what_is_said_twice_is_seen() -> None:
    """Also if its lines and links break elsewhere; a command may recur."""
    once = "one two three four five six [seven](a.md) eight\nnine ten eleven twelve thirteen"
    again = once.replace("a.md", "b.md#c").replace("\n", " ").replace(" three", "\nthree")
    code = f"```sh\n{again}\n```"
    assert said_twice({"a": once, "b": code}) == set()
    assert [pair[:2] for pair in said_twice({"a": once, "b": again})] == [("a", "b")]
