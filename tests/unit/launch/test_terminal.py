"""The launcher's terminal, found by a rank that has none:
with a stand-in for horovodrun on a real pty.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.terminal import on_terminal
from trainkit.launch.environment import Launcher
from trainkit.launch.terminal import terminal_of_launcher

RANK = """
import os
from trainkit.launch.environment import Launcher
from trainkit.launch import terminal as module
module.read_launcher = lambda: Launcher("horovodrun", 0, 2, 0, LOCAL)
terminal = module.terminal_of_launcher()
print(module.columns_of_launcher(), "columns for a line")
assert not os.isatty(1)
if terminal is not None:
    terminal.write(f"seen from the rank, {terminal.width} columns, {terminal.is_in_front}")
    terminal.close()
"""
# As horovodrun does: the rank has a session of its own, and its output is a pipe.
LAUNCHER = """
import subprocess, sys
import os
PREPARE
rank = [sys.executable, "-c", sys.argv[1]]
print("launched:", subprocess.run(rank, start_new_session=True, stdout=subprocess.PIPE, check=True, text=True).stdout)
"""


def launched(
    folder: Path, *words: str, prepare: str = "", local: int = 2, end: str = "", **environ: str
) -> str:
    """Return what a rank wrote on the terminal of its launcher."""
    rank = RANK.replace("LOCAL", str(local))
    command = [sys.executable, "-c", LAUNCHER.replace("PREPARE", prepare), rank, *words]
    if end:
        command = ["sh", "-c", f'"$@" {end}', "sh", *command]
    code, text = on_terminal(command, folder, 77, PYTHONPATH=str(Path.cwd()), **environ)
    assert code == 0, text
    return text


def test_a_rank_draws_on_the_launchers_terminal(tmp_path: Path) -> None:
    """It has no terminal itself, and its text arrives, without a prefix."""
    assert "seen from the rank, 77 columns, True" in launched(tmp_path)


@pytest.mark.parametrize(("given", "columns"), [("", 65), ("NO_COLOR", 65), ("CI", None)])
def test_a_line_has_room_for_the_launchers_prefix(
    tmp_path: Path, given: str, columns: int | None
) -> None:
    """Of 77 columns "[0]<stdout>:" takes 12; with NO_COLOR lines are as long, without a bar."""
    text = launched(tmp_path, prepare=f"os.environ['{given}'] = '1'" if given else "")
    assert f"launched: {columns} columns for a line" in text


# the first process of a session cannot leave its group
CHILD = "if os.fork():\n    os.wait(), sys.exit()\n"
BACKGROUND = "os.setpgid(0, 0)"


@pytest.mark.parametrize(
    "case",
    [
        {"end": "> log"},
        {"end": "| cat"},
        {"local": 1},
        {"prepare": CHILD + BACKGROUND},
        {"prepare": "os.environ['CI'] = 'true'"},
        {"prepare": "os.environ['TERM'] = 'dumb'"},
        {"prepare": "os.environ['NO_COLOR'] = '1'"},
        {"words": ["--output-filename", "logs"]},
    ],
    ids=[
        "into a file",
        "into a pipe",
        "on two hosts",
        "in the background",
        "in CI",
        "on a dumb terminal",
        "with NO_COLOR",
        "into files too",
    ],
)
def test_no_rank_draws_where_it_would_disturb(tmp_path: Path, case: dict[str, str]) -> None:
    """A job whose output goes elsewhere, that is in the background,
    or that has ranks elsewhere has lines.
    """
    assert "seen" not in launched(tmp_path, *case.pop("words", []), **case)  # type: ignore[arg-type]


def test_a_job_that_leaves_the_foreground_is_seen(tmp_path: Path) -> None:
    """What is drawn depends on where the launcher is now, not at the start."""
    rank = RANK.replace("LOCAL", "2").replace(
        "if terminal", "os.write(2, b'x'); input()\nif terminal"
    )
    start = LAUNCHER[: LAUNCHER.index("print")].replace("PREPARE", CHILD)
    moves = (
        "job = subprocess.Popen(rank, start_new_session=True, stdin=-1, stdout=-1,"
        " stderr=-1)\njob.stderr.read(1)\n"
    )
    command = [sys.executable, "-c", f"{start}{moves}{BACKGROUND}\njob.communicate(b'go')\n", rank]
    code, text = on_terminal(command, tmp_path, 77, PYTHONPATH=str(Path.cwd()))
    assert code == 0 and "77 columns, False" in text


@pytest.mark.parametrize("name", ["none", "torchrun", "mpirun", "srun"])
def test_other_launchers_have_none(name: str) -> None:
    """torchrun's ranks have the terminal as their stdout; the others' are elsewhere."""
    assert terminal_of_launcher(Launcher(name, 0, 2, 0, 2), {"TERM": "xterm"}) is None  # type: ignore[arg-type]


def test_nothing_is_left_open() -> None:
    """Where there is no terminal no file stays open."""
    before = len(os.listdir("/proc/self/fd"))
    assert terminal_of_launcher(Launcher("horovodrun", 0, 2, 0, 2), {"TERM": "xterm"}) is None
    assert len(os.listdir("/proc/self/fd")) == before


# As Open MPI does: a rank has a terminal of its own, which mpirun reads; also through a shell that
# the user put in between.
MPIRUN = """
import os, subprocess, sys
own, ranks = os.openpty()
subprocess.run(sys.argv[1:], stdout=ranks, check=True)
print(os.read(own, 1000).decode())
"""
RANK_OF_MPI = """
import sys
from rich.text import Text
from trainkit.console import console_of
from trainkit.launch.terminal import output_of_rank
assert sys.stdout.isatty()
with output_of_rank():
    console_of().print(Text("bold", style="bold"), sys.stdout.isatty())
"""
OF_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize("between", ["", '"$@"; exit'], ids=["alone", "in a shell"])
@pytest.mark.parametrize(
    ("end", "environ", "shown"),
    [
        ("", OF_OPEN_MPI, "\x1b[1mbold\x1b[0m True"),
        ("> log; cat log", OF_OPEN_MPI, "bold False"),
        ("| cat", OF_OPEN_MPI, "bold False"),
        ("| cat", {}, "\x1b[1mbold\x1b[0m True"),
    ],
    ids=["on a terminal", "into a file", "into a pipe", "not mpirun's"],
)
def test_a_terminal_that_mpirun_writes_to_a_file_is_none(
    tmp_path: Path, between: str, end: str, environ: dict[str, str], shown: str
) -> None:
    """What a rank prints is coloured only if mpirun itself is on a terminal."""
    rank = [sys.executable, "-c", RANK_OF_MPI]
    rank = ["sh", "-c", between, "sh", *rank] if between else rank
    command = ["sh", "-c", f'"$@" {end}', "sh", sys.executable, "-c", MPIRUN, *rank]
    code, text = on_terminal(command, tmp_path, 77, PYTHONPATH=str(Path.cwd()), **environ)
    assert code == 0, text
    assert shown in text
