"""Starts pairs of ranks, and kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port at which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pairs:
    """A server of pairs of ranks (workers/job.py);
    a context manager that leaves none of them behind.
    """

    def __init__(self, **environment: str) -> None:
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_", "OMP_"))
        }
        self._server = subprocess.Popen(
            [sys.executable, str(WORKERS / "job.py"), "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            start_new_session=True,
        )
        self.pids: list[int] = []

    def __enter__(self) -> Pairs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def start(self, run_dir: Path, steps: int) -> None:
        """Start a pair."""
        (run_dir / "stepping").unlink(missing_ok=True)
        assert self._server.stdin is not None
        self._server.stdin.write(f"{run_dir} {steps} {free_port()}\n")
        self._server.stdin.flush()
        self.pids = [int(word) for word in self._line().split()]

    def signal(
        self, number: signal.Signals, rank: int | None = None, workers: bool = False
    ) -> None:
        """Send a signal to one rank, or to both at once;
        to their loader workers too, as a scheduler does.
        """
        pids = self.pids if rank is None else [self.pids[rank]]
        for group in ([child for one in pids if workers for child in _children(one)], pids):
            for pid in group:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if workers:
                time.sleep(0.1)  # a worker that dies has died by the time its rank is asked

    def codes(self) -> list[int]:
        """Wait until both ranks have ended; return their exit codes (-9: killed)."""
        return [int(word) for word in self._line().split()]

    def alive(self) -> bool:
        """Whether both still run; a zombie counts as ended."""
        return all(_state(pid) not in ("Z", "") for pid in self.pids)

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server of ranks died"
        return line


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 240) -> None:
    """Poll a condition each millisecond:
    it may hold no longer, and a loop without a pause would take a core from the ranks.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.001)
