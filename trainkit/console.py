"""Output for people: a console, and paths relative to the current folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console


def console_of() -> Console:
    """Return a console; without a terminal its lines are long enough not to be folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def short(path: Path | str) -> str:
    """Return a path relative to the current folder, if it is inside; a URL unchanged."""
    if "://" in str(path):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def try_to_write(work: Callable[[], object], problem: str) -> None:
    """Do work that may fail with OSError, and print the problem if it does: training continues.

    Args:
        work: writes files.
        problem: the start of the sentence, as "metrics.csv could not be written".
    """
    try:
        work()
    except OSError as error:
        print(f"{problem}: {error}. Training continues.", flush=True)
