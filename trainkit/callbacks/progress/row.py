"""One row of progress that fits any width: the bar and its count stay;
what else does not fit is cut or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar as RichBar
from rich.table import Table
from rich.text import Text

_BAR = 12  # narrowest; narrower still only if the count needs the room
_WIDEST_BAR = 40
_GAP = 1
_SHORTEST_NAME = 8


@dataclass(frozen=True)
class Row:
    """A piece of work as one line: name, bar, count, rate, remaining time, values.

    On a narrow terminal the values go first, the last ones before the others, then the rate and the
    time, then the name is cut.
    """

    name: str
    done: float
    total: float | None
    rate: str = ""
    left_s: float | None = None
    values: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 1  # a cursor after the last column may wrap
        count = f"{self.done:.0f}/{'?' if self.total is None else f'{self.total:.0f}'}"
        room = width - _BAR - _GAP - len(count)  # for all that is not bar and count
        name = _cut(self.name, max(room - _GAP, 0))
        room -= cell_len(name) + _GAP
        shown = []
        for text in (self.rate, _clock(self.left_s)):
            if text and len(text) + _GAP <= room:
                shown.append(text)
                room -= len(text) + _GAP
        values = _fitting(self.values, room - _GAP)
        if values:
            shown.append(values)
            room -= cell_len(values) + _GAP
        bar = max(1, min(_BAR + max(room, 0), _WIDEST_BAR, width - len(count) - _GAP))
        grid = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        cells: list[Text | RichBar] = [Text(name)] if name else []
        cells.append(
            RichBar(total=self.total, completed=self.done, width=bar, pulse=self.total is None)
        )
        styles = ["green", *["cyan"] * len(shown)]
        cells += [
            Text(text, style=style) for text, style in zip([count, *shown], styles, strict=True)
        ]
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        yield grid


def _cut(name: str, width: int) -> str:
    """Return a name that fits; none if so little of it would be left that it says nothing."""
    if cell_len(name) <= width:
        return name
    text = Text(name)
    text.truncate(width, overflow="ellipsis")
    return text.plain if width >= _SHORTEST_NAME else ""


def _fitting(values: Sequence[str], width: int) -> str:
    """Return as many whole values as fit, and a mark for the others;
    if not even one does, the beginning of the first.
    """
    for count in range(len(values), 0, -1):
        text = "  ".join([*values[:count], *["…"] * (count < len(values))])
        if cell_len(text) <= width:
            return text
    return _cut(values[0], width) if values else ""


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
