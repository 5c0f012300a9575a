"""The part of docs/lightning.md that is written from the table of behaviours:
python -m tests.same_names.page
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.same_names import (
    batches,
    by_hand,
    epochs,
    logs,
    monitors,
    ports,
    ranks,
    resumes,
    runs,
    steps,
)
from tests.same_names.table import ROWS, ROWS_OF_RANKS, Row

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
TITLE = "\n## Behaviour\n"
assert all((batches, by_hand, epochs, logs, monitors, ports, ranks, resumes, runs, steps)), (
    "their import fills the table"
)

INTRODUCTION = """
Names are not enough: each row below runs in both trainers, in one process, and a test compares the results
(`tests/same_names/`).
"""


ON_RANKS = """
### On two ranks

Scripts on two ranks, there with `strategy="ddp"`. In both, `save_checkpoint`, `should_stop = True` and `all_gather` belong on
all ranks, at the same step.
"""


def section() -> str:
    """Return the section's text."""
    lines = [TITLE, INTRODUCTION, *_verdicts(ROWS), ON_RANKS, *_verdicts(ROWS_OF_RANKS)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _verdicts(table: list[Row]) -> list[str]:
    same = sorted({row.name for row in table if row.verdict == "equal"}, key=str.lower)
    refused = sorted({row.name for row in table if row.verdict == "refused"}, key=str.lower)
    lines = ["Differs, because:\n", "| | |", "|---|---|"]
    lines += [f"| {row.name} | {row.text} |" for row in table if row.verdict == "differs"]
    lines += ["\nRefused, with what to do:\n", *(f"- {name}" for name in refused)]
    return [*lines, f"\nThe same, {len(same)} behaviours:\n", *(f"- {name}" for name in same)]


def written() -> str:
    """Return the whole page as it must be."""
    return PAGE.read_text().partition(TITLE)[0].rstrip("\n") + "\n" + section()


if __name__ == "__main__":
    PAGE.write_text(written())
