"""Two displays of progress: a live bar on a terminal or in a notebook, and lines in a file, in CI
and on several hosts.

The third, for ranks of horovodrun on one host, is in launched.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.table import Table
from rich.text import Text

from trainkit.callbacks.progress.row import Row
from trainkit.console import is_a_terminal

LINE_EVERY_S = 30.0  # so that a long epoch shows signs of life
_REDRAW_S = 0.1


class Screen(Protocol):
    """Shows progress. Work is one pass: an epoch's steps, a validation's batches."""

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        """Start a piece of work; nested work hides the outer one until it ends."""

    def moved(self, done: int, rate: str, values: Sequence[str]) -> None:
        """Update how much of it is done."""

    def end(self) -> None:
        """End the innermost work."""

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        """Show the values of a finished epoch."""

    def say(self, text: str) -> None:
        """Show a line that stays on the screen."""

    def close(self) -> None:
        """Restore the screen."""


class Lines(Screen):
    """Prints a line each half minute, and one for each epoch: on a terminal without colours a row
    of a table, as wide as that is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epochs = EpochTable() if is_a_terminal(console.file) else None
        self._work: list[tuple[str, int | None]] = []
        self._printed = time.monotonic()

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        if not self._work:
            self._printed = time.monotonic()
        self._work.append((name, total))

    def moved(self, done: int, rate: str, values: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._printed >= LINE_EVERY_S:
            self._printed = now
            name, total = self._work[-1]
            self.say(
                "  ".join(
                    filter(None, (f"{name} {done}{f'/{total}' if total else ''}", rate, *values))
                )
            )

    def end(self) -> None:
        self._work.pop()

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        if self._epochs is not None:
            for row in self._epochs.rows(name, values, rate, seconds, self._console.width):
                self._console.print(row)
            return
        self.say(
            "  ".join(
                [
                    name,
                    *(f"{key} {value:.4g}" for key, value in values.items()),
                    rate,
                    f"{seconds:.1f} s",
                ]
            )
        )

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Do nothing: lines leave nothing to restore."""


class Bars(Screen):
    """Shows a bar for the epoch, or for a validation within it, and a table with a row for each
    epoch.

    rich's thread draws the bar; a step only updates a number, at most ten times a second.
    """

    def __init__(self, console: Console, refresh_rate: float) -> None:
        self._bars = Progress(
            _RowColumn(),
            console=console,
            expand=True,
            transient=True,
            refresh_per_second=refresh_rate,
        )
        self._bars.start()
        self._work: list[TaskID] = []
        self._drawn = 0.0
        self._epochs = EpochTable()

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        if self._work:
            self._bars.update(self._work[-1], visible=False)
        self._work.append(
            self._bars.add_task(name, total=total, completed=done, rate="", values=())
        )
        self._drawn = 0.0

    def moved(self, done: int, rate: str, values: Sequence[str]) -> None:
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bars.update(self._work[-1], completed=done, rate=rate, values=values)

    def end(self) -> None:
        self._bars.remove_task(self._work.pop())
        if self._work:
            self._bars.update(self._work[-1], visible=True)
        self._bars.refresh()  # else the next print would draw it again
        self._drawn = 0.0

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        for line in self._epochs.rows(name, values, rate, seconds, self._bars.console.width):
            self._bars.print(line)

    def say(self, text: str) -> None:
        self._bars.print(Text(text))

    def close(self) -> None:
        self._bars.stop()


class _RowColumn(ProgressColumn):
    """A task as a Row of the whole width."""

    def render(self, task: Task) -> Row:
        fields = task.fields
        return Row(
            task.description,
            task.completed,
            task.total,
            fields["rate"],
            task.time_remaining,
            fields["values"],
        )


class EpochTable:
    """The values of epochs as a table, one row after another."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def rows(
        self, name: str, values: Mapping[str, float], rate: str, seconds: float, width: int
    ) -> list[Text | Table]:
        """Return an epoch's row, after the header if its columns are new;
        values that do not fit are one per line.
        """
        cells = (
            {"": name}
            | {key: f"{value:.4g}" for key, value in values.items()}
            | {"rate": rate, "time": f"{seconds:.1f} s"}
        )
        widths = {key: max(len(key), len(cell), 9) for key, cell in cells.items()}
        if sum(widths.values()) + 2 * (len(widths) - 1) > width:  # too wide: one value per line
            table = Table(show_header=False, box=None, padding=(0, 2))
            for key, cell in cells.items():
                table.add_row(Text(key, style="dim"), cell)
            return [table]
        row = Text("  ".join(cell.rjust(widths[key]) for key, cell in cells.items()))
        if list(cells) == self._columns:
            return [row]
        self._columns = list(cells)
        return [Text("  ".join(key.rjust(widths[key]) for key in cells), style="bold"), row]
