"""A bar on the terminal of the launcher, whose other lines,
of this rank and of others, stay readable.
"""

from __future__ import annotations

import functools
import io
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, RenderableType

from trainkit.callbacks.progress.displays import EpochTable, Lines, Screen
from trainkit.callbacks.progress.row import Row
from trainkit.console import console_of
from trainkit.launch.terminal import Terminal
from trainkit.safety.threads import printed, start_thread

_CLEAR = "\r\x1b[J"  # the line of the cursor and those below
_BACK = "\r\x1b[1A"


@dataclass
class _Work:
    """A pass; the speed is that since it began here."""

    name: str
    total: int | None
    first: int
    done: int
    rate: str = ""
    values: Sequence[str] = ()
    began: float = field(default_factory=time.monotonic)

    def row(self) -> Row:
        made, seconds = self.done - self.first, time.monotonic() - self.began
        left = (
            None if self.total is None or made == 0 else (self.total - self.done) * seconds / made
        )
        return Row(self.name, self.done, self.total, self.rate, left, self.values)


class LaunchedBar(Screen):
    """Draws one line, the innermost work, below an empty one where the cursor rests: there the
    launcher prints others' lines.

    Epochs and messages are printed above it. While the job is in the background they are lines on
    stdout, for the launcher to print, and no bar is drawn. A thread draws, so that a step only
    updates numbers. The cursor is never hidden: a killed rank leaves nothing to restore.
    """

    def __init__(self, terminal: Terminal, refresh_rate: float) -> None:
        self._terminal = terminal
        self._lines = Lines(console_of())
        self._work: list[_Work] = []
        self._epochs = EpochTable()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        draw = functools.partial(self._draw, 1 / refresh_rate)
        self._thread = start_thread(
            "progress", draw, printed("The bar is not moved any more; training continues.")
        )

    def begin(self, name: str, total: int | None, done: int = 0) -> None:
        self._work = [*self._work, _Work(name, total, done, done)]
        self._lines.begin(name, total, done)

    def moved(self, done: int, rate: str, values: Sequence[str]) -> None:
        work = self._work[-1]
        work.done = done
        work.rate = rate
        work.values = values

    def end(self) -> None:
        self._work = self._work[:-1]
        self._lines.end()

    def epoch(self, name: str, values: Mapping[str, float], rate: str, seconds: float) -> None:
        if self._terminal.is_in_front:
            self._print(*self._epochs.rows(name, values, rate, seconds, self._terminal.width))
        else:
            self._lines.epoch(name, values, rate, seconds)

    def say(self, text: str) -> None:
        if self._terminal.is_in_front:
            self._print(text)
        else:
            self._lines.say(text)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._terminal.is_in_front:
            self._terminal.write(_CLEAR)
        self._terminal.close()

    def _draw(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            if self._work and self._terminal.is_in_front:
                self._print()

    def _print(self, *above: RenderableType) -> None:
        """Print texts, each on lines of its own, and the bar below."""
        with self._lock:
            bar = f"\n{self._rendered(self._work[-1].row())}{_BACK}" if self._work else ""
            self._terminal.write(
                _CLEAR + "".join(f"{self._rendered(text)}\n" for text in above) + bar
            )

    def _rendered(self, shown: RenderableType) -> str:
        file = io.StringIO()
        console = Console(
            file=file, force_terminal=True, width=self._terminal.width, highlight=False
        )
        console.print(shown, markup=False, soft_wrap=isinstance(shown, str))
        return file.getvalue().removesuffix("\n")
