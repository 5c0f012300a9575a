"""Runs commands as a user would: in an empty folder, in their own process group, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


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


def run_command(line: str, cwd: Path, timeout_s: float = 240, **environment: str) -> Done:
    """Run a shell command with this environment's programs; end its whole group when its time is over."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "WANDB_MODE": "offline"} | environment
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
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"`{line}` did not end within {timeout_s} s:\n{out[-2000:]}\n{err[-2000:]}")
    return Done(process.returncode, out, err)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A function that runs a command in the test's own empty folder."""

    def run(line: str, timeout_s: float = 240, **environment: str) -> Done:
        return run_command(line, tmp_path, timeout_s, **environment)

    return run
