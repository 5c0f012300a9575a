"""The part of docs/lightning.md that is written from the table of behaviours:
python -m tests.same_names.page
"""

from __future__ import annotations

from pathlib import Path

from tests.same_names import logs, ports, runs, steps
from tests.same_names.table import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
TITLE = "\n## Behaviour\n"
assert steps and runs and logs and ports, "their import fills the table"

INTRODUCTION = """
Names are not enough: each row below runs in both trainers, in one process, and a test compares the results
(`tests/same_names/`).
"""


def section() -> str:
    """Return the section's text."""
    same = sorted({row.name for row in ROWS if row.verdict == "equal"}, key=str.lower)
    refused = sorted({row.name for row in ROWS if row.verdict == "refused"}, key=str.lower)
    lines = [TITLE, INTRODUCTION, "Differs, because:\n", "| | |", "|---|---|"]
    lines += [f"| {row.name} | {row.text} |" for row in ROWS if row.verdict == "differs"]
    lines += ["\nRefused, with what to do:\n", *(f"- {name}" for name in refused)]
    lines += [f"\nThe same, {len(same)} behaviours:\n", *(f"- {name}" for name in same)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def written() -> str:
    """Return the whole page as it must be."""
    return PAGE.read_text().partition(TITLE)[0].rstrip("\n") + "\n" + section()


if __name__ == "__main__":
    PAGE.write_text(written())
