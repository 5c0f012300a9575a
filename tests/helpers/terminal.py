"""Runs commands on a terminal: a pty of a chosen width,
in the foreground of a session of its own.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest


def on_terminal(
    command: Sequence[str], cwd: Path, columns: int, timeout_s: float = 240, **environ: str
) -> tuple[int, str]:
    """Run a command on a terminal of 30 lines;
    return its exit code, and all that the terminal received.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(cwd)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("CI", "COLUMNS", "FORCE_COLOR", "NO_COLOR")
        }
        os.execvpe(command[0], list(command), env | {"TERM": "xterm-256color"} | environ)
    received, until = b"", time.monotonic() + timeout_s
    try:
        while time.monotonic() < until:
            try:
                received += (chunk := os.read(terminal, 65536))
            except OSError:  # all that had it open have ended
                break
            if not chunk:
                break
        else:
            os.killpg(process, signal.SIGKILL)
            pytest.fail(
                f"{' '.join(command)} did not end within {timeout_s}"
                f" s:\n{received[-2000:].decode(errors='replace')}"
            )
    finally:
        os.close(terminal)
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), received.decode(errors="replace")


def drawn(received: str) -> list[str]:
    """Return what was drawn line by line, as plain text:
    each redraw of a line is one of its own.
    """
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", received)]
