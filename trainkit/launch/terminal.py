"""The terminal that a launcher was started in: horovodrun's, for rank 0 to draw on, and whether
mpirun has one.

horovodrun reads its ranks' output by pipes, prints it line by line with a prefix, and gives each
rank a session of its own, so that a rank has neither a terminal on its stdout nor /dev/tty. The
launcher itself, the first process above that session, may have one on its stdout, and a rank of the
same user on the same host can open it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.console import Output, is_without_colors
from trainkit.launch.environment import Launcher, read_launcher

_MOST_ANCESTORS = 20
_PREFIX = "[0]<stdout>:"
_FEWEST_COLUMNS = 40


@dataclass(frozen=True)
class Stat:
    """What /proc says of a process;
    `foreground` is the process group that its terminal's keys belong to, -1 without one.
    """

    parent: int
    group: int
    session: int
    terminal: int
    foreground: int


class Terminal:
    """The launcher's terminal, open for writing; `process` is the launcher.

    It never becomes this process's controlling terminal, so that no write stops a rank, and a write
    never waits: of a terminal that is held up (Ctrl-S) or whose window is closed, the text is
    dropped.
    """

    def __init__(self, process: int, file: int) -> None:
        self._process = process
        self._file = file

    @property
    def is_in_front(self) -> bool:
        """Whether the launcher is in the foreground of its terminal:
        neither stopped, nor in the background, nor ended.
        """
        stat = read_stat(self._process)
        return stat is not None and stat.group == stat.foreground

    @property
    def width(self) -> int:
        """The columns of the terminal, as of now."""
        try:
            return os.get_terminal_size(self._file).columns or 80
        except OSError:
            return 80

    def write(self, text: str) -> None:
        """Write a text in one piece: lines of other processes come before or after it."""
        with contextlib.suppress(OSError):
            os.write(self._file, text.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def terminal_of_launcher(
    launcher: Launcher | None = None, environ: Mapping[str, str] = os.environ
) -> Terminal | None:
    """Return the terminal of the horovodrun that started this rank, None if it is not one to draw
    on.

    None: another launcher, ranks on other hosts, CI, NO_COLOR, a dumb terminal, output that is
    redirected or also goes to files (--output-filename), a job in the background.
    """
    launcher = launcher or read_launcher()
    if launcher.name not in ("horovodrun", "launch") or launcher.local_size != launcher.world_size:
        return None
    if environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    if environ.get("CI") or is_without_colors(environ):
        return None
    process = _starter()
    if process is None or "--output-filename" in _command_line(process):
        return None
    try:
        file = os.open(
            f"/proc/{process}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:  # another user's
        return None
    terminal, stat = Terminal(process, file), read_stat(process)
    if (
        stat is not None
        and os.isatty(file)
        and os.fstat(file).st_rdev == stat.terminal
        and terminal.is_in_front
    ):
        return terminal
    terminal.close()
    return None


def columns_of_launcher() -> int | None:
    """Return how many columns a line of this rank has on the launcher's terminal, which prints
    "[0]<stdout>:" before it; None without such a terminal.
    """
    coloured = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    terminal = terminal_of_launcher(environ=coloured)
    if terminal is None:
        return None
    width = terminal.width - len(_PREFIX)
    terminal.close()
    return max(width, _FEWEST_COLUMNS)


def output_of_rank(is_product: bool = False) -> Output:
    """Return the guard of this process's standard output and errors: plain text, if their terminal
    only leads to a file; `is_product` as in Output.

    Entered within another one, it is the outer one.
    """
    return Output(is_terminal_of_no_one(), is_product)


def is_terminal_of_no_one() -> bool:
    """Return whether this rank's stdout is a terminal that only mpirun reads, and writes to a file
    or a pipe.

    Open MPI gives each rank a terminal, also in a batch job: colours and bars would be in the job's
    output.
    """
    stdout = 1
    if read_launcher().name != "mpirun" or not os.isatty(stdout):
        return False
    own = os.ttyname(stdout)
    process = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        try:
            target = os.readlink(f"/proc/{process}/fd/1")
        except OSError:  # another user's, or the end of the line
            return False
        if target != own:  # not a shell in between
            return not target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
        stat = read_stat(process)
        if stat is None:
            return False
        process = stat.parent
    return False


def read_stat(process: int) -> Stat | None:
    """Return what /proc says of a process, None if it has ended."""
    try:
        parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(*map(int, parts[1:6]))


def _starter() -> int | None:
    """Return the first process above this process's session."""
    process, session = os.getppid(), os.getsid(0)
    for _ in range(_MOST_ANCESTORS):
        stat = read_stat(process)
        if stat is None or process <= 1:
            return None
        if stat.session != session:
            return process
        process = stat.parent
    return None


def _command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
