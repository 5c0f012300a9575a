"""What each rank of a test's job has found:
a file of its own, since lines of ranks that share a pipe arrive mixed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep_found(rank: int, results: Any, folder: Path = Path()) -> None:
    """Write what a rank has found."""
    (folder / f"found-{rank}.json").write_text(json.dumps(results))


def take_found(folder: Path) -> list[Any]:
    """Return what the ranks have found, by rank, and remove their files."""
    files = sorted(folder.glob("found-*.json"))
    results = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return results
