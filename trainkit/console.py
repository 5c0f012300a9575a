"""Output for people: messages, a console, paths relative to the current folder, streams that may be
lost. Imports no torch.

The messages of a run go through logging.getLogger("trainkit"): INFO for what happens, WARNING for
what a user should act on. They are printed, each at once, as long as the program has given that
logger no handler; nothing is configured here. With one, they are records of that logger.
docs/logging.md says how to silence and to redirect them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

LOGGER = logging.getLogger("trainkit")
_TENSORS = 4  # maximum number of tensor names in a message
# A command to copy, in a message.
_COMMAND = re.compile(r"\b(python3? -m|pip install|horovodrun|torchrun|mpirun|srun|sbatch) ")
# Control characters, which a terminal would obey: shown as \x1b. Of a file's text they may come
# from anywhere.
_SHOWN = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    """Return a text for a terminal:
    each control character but the line's end and the tab is shown, not obeyed.
    """
    return text.translate(_SHOWN)


class _Console(Console):
    """Prints the control characters of texts as `visible` does; rich's own, for colours, stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def console_of(file: IO[str] | None = None, width: int = 200) -> Console:
    """Return a console of an open file, or of stdout, that prints texts as they are: no markup.

    Only a terminal gets colours and bars, whatever FORCE_COLOR says, which CI and launchers hand on
    to all processes, and only without NO_COLOR. Elsewhere the text is plain, with `width` columns,
    enough for lines not to be folded.
    """
    is_terminal = is_a_terminal(file or sys.stdout)
    return _Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=is_terminal and not is_without_colors(),
        width=None if is_terminal else width,
    )


def is_a_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; false for none, and for a closed one."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # none, a user's own object, or closed
        return False


def is_without_colors(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user asks for plain text by NO_COLOR (no-color.org), on terminals too."""
    return bool(environ.get("NO_COLOR"))


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Return a text whose long lines break between words, for a terminal of `width` columns.

    A line with a command stays in one piece: it is copied.

    Args:
        text: of any number of lines.
        width: columns.
        indent: of the parts of a line after its first, beside the line's own.
    """
    return "\n".join(
        line if _COMMAND.search(line) else _wrapped_line(line, width, indent)
        for line in text.split("\n")
    )


def _wrapped_line(line: str, width: int, indent: int) -> str:
    own = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line,
        width,
        subsequent_indent=own + " " * indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrapped_for(stream: Any, text: str, indent: int = 0) -> str:
    """Return a text for a stream: wrapped if that is a terminal, else as it is."""
    if not is_a_terminal(stream):
        return text
    return wrapped(text, console_of(stream).width, indent)


def short(path: Path | str) -> str:
    """Return a path relative to the current folder, if it is inside; a URL unchanged."""
    if "://" in str(path):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def cell(value: object) -> object:
    """Return a value for a CSV file: a text that a spreadsheet would run as a formula is quoted;
    numbers stay numbers.
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def plural(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def what_waits(waiting: str, tensors: Sequence[str]) -> str:
    """Describe what a rank waits for, with the first few tensors waiting in it."""
    if not tensors:
        return waiting
    more = len(tensors) - _TENSORS
    return f"{waiting}: {', '.join(tensors[:_TENSORS])}{f' and {more} more' if more > 0 else ''}"


def info(text: str) -> None:
    """Say what happens. Most callers do so on rank 0 alone."""
    _log(logging.INFO, text, "stdout")


def warning(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Say what a user should know to act; it is printed on `stream`."""
    _log(logging.WARNING, text, stream)


def are_printed() -> bool:
    """Return whether messages are printed; else the handlers of the program receive them."""
    return not LOGGER.handlers


def is_shown(level: int) -> bool:
    """Return whether the program's level for the logger lets a message pass;
    INFO if it has set none.
    """
    return level >= (LOGGER.level or logging.INFO) and level > LOGGER.manager.disable


def _log(level: int, text: str, stream: str) -> None:
    if LOGGER.handlers:
        LOGGER.log(level, text, stacklevel=3)
    elif is_shown(level):
        print(text, file=getattr(sys, stream), flush=True)


def try_to_write(work: Callable[[], object], problem: str) -> None:
    """Do work that may fail with OSError, and print the problem if it does: training continues.

    Args:
        work: writes files.
        problem: the start of the sentence, as "metrics.csv could not be written".
    """
    try:
        work()
    except OSError as error:
        warning(f"{problem}: {error}. Training continues.")


def show_table(drawn: RenderableType, width: int = 200, **options: Any) -> None:
    """Show a table or a text as a message:
    with colours on a terminal, or plain to the handlers of the program.
    """
    if are_printed():
        if is_shown(logging.INFO):
            console_of(width=width).print(drawn, **options)
        return
    file = io.StringIO()
    console_of(file, width).print(drawn, **options)
    info("\n".join(line.rstrip() for line in file.getvalue().splitlines()))


class Output:
    """Standard output and errors that training does not depend on: what cannot be written is
    dropped.

    A context manager, which may be nested. The first failure of a stream (its reader has ended, its
    disk is full) is reported on the other one, and in a file. From then on the stream is the null
    device, for native code and for Python's exit too.

    Args:
        is_plain: the streams count as files, with no colours and no bar, although they may be
            terminals.
        is_product: printing is all the work: it ends, without a message, once stdout has no reader
            (`| head`), and with one if the disk is full.
    """

    def __init__(self, is_plain: bool = False, is_product: bool = False) -> None:
        self.is_plain = is_plain
        self.is_product = is_product
        self._guarded: dict[str, _Stream] = {}
        self._notes: list[str] = []
        self._file: Path | None = None

    def __enter__(self) -> Output:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Stream):
                return stream.output  # the outer one's
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) is not None:
                self._guarded[name] = _Stream(stream, name, self)
                setattr(sys, name, self._guarded[name])
        return self

    def __exit__(self, *_: object) -> None:
        for name, stream in self._guarded.items():
            stream.flush()  # Python's own flush at its exit would fail
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)

    def report_in(self, file: Path) -> None:
        """Report losses in this file too: those so far, and those to come."""
        self._file = file
        self._write()

    def lost(self, name: str, error: Exception) -> None:
        """Take note that a stream has failed."""
        other = self._guarded["stderr" if name == "stdout" else "stdout"]
        text = (
            f"{name} cannot be written: {error}. What is printed there is dropped from here on; the"
            " work continues."
        )
        self._notes.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._write()
        other.write(f"{text}\n")
        other.flush()

    def _write(self) -> None:
        if self._file is not None and self._notes:
            with contextlib.suppress(OSError):  # the same full disk
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as file:
                    file.writelines(self._notes)
                self._notes.clear()


class _Stream:
    """A text stream, its failures taken by an Output."""

    def __init__(self, stream: TextIO, name: str, output: Output) -> None:
        self.stream = stream
        self.output = output
        self._name = name
        self._is_lost = False

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def isatty(self) -> bool:
        return not self.output.is_plain and self.stream.isatty()

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if self._is_lost:
                return
            self._is_lost = True
            with contextlib.suppress(OSError, ValueError):  # it has no descriptor
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(null, self.stream.fileno())
                os.close(null)
            if self.output.is_product and self._name == "stdout":
                full = f"Error: the output cannot be written: {error.strerror}."
                raise SystemExit(0 if isinstance(error, BrokenPipeError) else full) from None
            self.output.lost(self._name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
