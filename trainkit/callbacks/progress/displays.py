"""Two displays of progress: live bars on a terminal or in a notebook, and lines everywhere else.

There is no terminal under horovodrun (its output is a pipe with a prefix on each line), in a file, and in CI.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 30.0  # so that a long epoch shows signs of life
_REDRAW_S = 0.1


class Screen(Protocol):
    """Shows progress. Work is one pass: an epoch's steps, a validation's batches."""

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        """Start a piece of work; nested work hides the outer one until it ends."""

    def moved(self, done: int, rate: str, values: str) -> None:
        """Update how much of it is done."""

    def end(self) -> None:
        """End the innermost work."""

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        """Show the values of a finished epoch."""

    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""

    def close(self) -> None:
        """Restore the screen."""


def make_screen(console: Console, refresh_rate: float) -> Screen:
    """Return the display for a console."""
    widgets = importlib.util.find_spec("ipywidgets") is not None
    lives = console.is_terminal and not console.is_dumb_terminal and (widgets or not console.is_jupyter)
    return Bars(console, refresh_rate) if lives else Lines(console)


class Lines(Screen):
    """Prints a line each half minute, and one for each epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._work: list[tuple[str, int | None]] = []
        self._printed = time.monotonic()

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        if not self._work:
            self._printed = time.monotonic()
        self._work.append((name, total))

    def moved(self, done: int, rate: str, values: str) -> None:
        now = time.monotonic()
        if now - self._printed >= LINE_EVERY_S:
            self._printed = now
            name, total = self._work[-1]
            self.say("  ".join(filter(None, (f"{name} {done}{f'/{total}' if total else ''}", rate, values))))

    def end(self) -> None:
        self._work.pop()

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        self.say("  ".join([name, *(f"{key} {value:.4g}" for key, value in values.items()), rate, f"{seconds:.1f} s"]))

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Do nothing: lines leave nothing to restore."""


class Bars(Screen):
    """Shows a bar for the epoch, one for a validation within it, and a table with a row for each epoch.

    rich's thread draws them; a step only updates a number, at most ten times a second.
    """

    def __init__(self, console: Console, refresh_rate: float) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[values]}"),
            console=console,
            transient=True,
            refresh_per_second=refresh_rate,
        )
        self._bars.start()
        self._work: list[TaskID] = []
        self._drawn = 0.0
        self._columns: list[str] = []

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        self._work.append(self._bars.add_task(name, total=total, completed=done, rate="", values=""))
        self._drawn = 0.0

    def moved(self, done: int, rate: str, values: str) -> None:
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bars.update(self._work[-1], completed=done, rate=rate, values=values)

    def end(self) -> None:
        self._bars.remove_task(self._work.pop())
        self._bars.refresh()  # else the next print would draw it again
        self._drawn = 0.0

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        """The header is printed again if the columns change; values that do not fit are printed one per line."""
        cells = {"": name} | {key: f"{value:.4g}" for key, value in values.items()} | {"rate": rate, "time": f"{seconds:.1f} s"}
        widths = {key: max(len(key), len(cell), 9) for key, cell in cells.items()}
        if sum(widths.values()) + 2 * len(widths) > self._console.width:  # too wide: one value per line
            table = Table(show_header=False, box=None, padding=(0, 2))
            for key, cell in cells.items():
                table.add_row(Text(key, style="dim"), cell)
            self._bars.print(table)
            return
        if list(cells) != self._columns:
            self._columns = list(cells)
            self._bars.print(Text("  ".join(key.rjust(widths[key]) for key in cells), style="bold"))
        self._bars.print(Text("  ".join(cell.rjust(widths[key]) for key, cell in cells.items())))

    def say(self, text: str) -> None:
        self._bars.print(Text(text))

    def close(self) -> None:
        self._bars.stop()
