"""Grid: a table for the terminal and for a page; and the number formats of both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table

_NARROWEST = 16


@dataclass(frozen=True)
class Grid:
    """A table for the terminal or a page."""

    title: str
    columns: tuple[str, ...]  # column names; all but the first and the `sentences` hold numbers
    rows: Sequence[tuple[str, ...]]
    sentences: tuple[int, ...] = ()  # indices of the columns that hold sentences
    is_code: bool = False  # whether the first column holds commands, or names from code

    def is_text(self, column: int) -> bool:
        """Return whether a column, counted from 0, holds text."""
        return column == 0 or column in self.sentences

    def fitted(self, width: int, needed: Collection[str]) -> tuple[Grid, list[str]]:
        """Return the table without columns that a line has no room for, the last first, and the
        names of these.

        Args:
            width: characters of a line.
            needed: names of columns that stay, beside the first.
        """
        # a longer text is folded: it must not take the room of all others
        most = max(_NARROWEST, width // 3)
        wide = [
            min(max(map(cell_len, cells)), most) + 3
            for cells in zip(self.columns, *self.rows, strict=True)
        ]
        shown = list(range(len(self.columns)))
        for i in reversed(shown):
            if i > 0 and self.columns[i] not in needed and sum(wide[j] for j in shown) >= width:
                shown = [j for j in shown if j != i]
        columns = tuple(self.columns[i] for i in shown)
        rows = [tuple(row[i] for i in shown) for row in self.rows]
        sentences = tuple(place for place, i in enumerate(shown) if i in self.sentences)
        left_out = [name for i, name in enumerate(self.columns) if i not in shown]
        return Grid(self.title, columns, rows, sentences, self.is_code), left_out

    def rich(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(
                column, justify="left" if self.is_text(i) else "right", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*row)
        return table


def ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{1000 * seconds:,.0f} ms"


def share(part: float, whole: float) -> str:
    """Format a part as a percentage of the whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def human(count: float) -> str:
    """Format a number of bytes in powers of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
