"""Runs commands as a user would:
in an empty folder, in their own process group, with a time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.forks import server

BIN = Path(sys.executable).parent
_MARK = "TRAINKIT_TEST_COMMAND"


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both outputs."""
        return self.out + self.err


Command = Callable[..., Done]


def run_command(line: str, cwd: Path, timeout_s: float = 480, **environment: str) -> Done:
    """Run a shell command with this environment's programs; nothing that it started outlives it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {
        "PATH": path(),
        "WANDB_MODE": "offline",
        _MARK: uuid.uuid4().hex,
    } | environment
    process = subprocess.Popen(
        line,
        shell=True,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        stacks = _stacks({*_marked(env[_MARK]), *_children(server()[0])})
        _end_all(env[_MARK])
        out, err = process.communicate()
        pytest.fail(
            f"`{line}` did not end within {timeout_s} s:\n{out[-2000:]}\n{err[-2000:]}\n{stacks}"
        )
    finally:
        _end_all(env[_MARK])
    return Done(process.returncode, out, err)


def path() -> str:
    """Return PATH with this environment's programs first; those of Python are forks
    (tests/helpers/forks.py).
    """
    return f"{server()[1]}:{BIN}:{os.environ['PATH']}"


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes that carry the mark: launchers give ranks groups of their own."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # gone by now, or not ours
                if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _children(parent: int) -> Iterator[int]:
    """Yield the forks: their environment, as others see it,
    is still that of the process that they come from.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    yield int(folder.name)


def _stacks(pids: Iterable[int]) -> str:
    """Return what each process does, for a command that hangs."""
    dump = [str(BIN / "py-spy"), "dump", "--native", "--pid"]
    found = []
    for pid in sorted(pids):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [*dump, str(pid)], check=False, capture_output=True, text=True, timeout=30
            )
            found.append(done.stdout or f"process {pid}: {done.stderr}")
    return "\n".join(found)


def _end_all(mark: str) -> None:
    """Kill processes that carry the mark: they outlive a killed launcher."""
    for pid in _marked(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A function that runs a command in the test's own empty folder."""

    def run(line: str, timeout_s: float = 480, **environment: str) -> Done:
        return run_command(line, tmp_path, timeout_s, **environment)

    return run
