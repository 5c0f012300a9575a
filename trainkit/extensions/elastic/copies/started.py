"""The driver's side of copies: a copy server on each host that has a worker, if ranks ask for copies."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.extensions.elastic.backend import Backend, Started
from trainkit.extensions.elastic.messages import Start
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.rendezvous import WorkerRequest
from trainkit.extensions.elastic.workers import describe

_PAUSE_S = 5.0  # between two starts on a host
_MODULE = "trainkit.extensions.elastic.copies.server"


def server_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a copy server: by the Python of the workers' command, else the driver's
    own.
    """
    is_python = Path(command[0]).name.startswith("python")
    return (command[0] if is_python else sys.executable, "-m", _MODULE)


def host_of(worker: str) -> str:
    """Return the host of a worker, or of a copy server, by its name."""
    return worker.rpartition("/")[0]


class CopyServers:
    """The copy servers of a job. Its methods are called from any thread.

    Args:
        starter: starts them.
        given: returns the job's variables in the environment of a process.
        output: takes what they print.

    Attributes:
        step: the newest that a worker has reported.
    """

    def __init__(
        self, starter: Backend, given: Callable[[Start], Mapping[str, str]], output: WorkerOutput
    ) -> None:
        self._starter, self._given, self._output = starter, given, output
        self._lock = threading.Lock()
        self._processes: dict[str, Started] = {}
        self._addresses: dict[str, list[Any]] = {}
        self._ready_at: dict[str, float] = {}
        self._is_closed = False
        self.step = 0

    def ensure(self, host: str) -> None:
        """Start a server on a host, unless there is one or another start has just failed."""
        with self._lock:
            now = time.monotonic()
            if self._is_closed or host in self._processes or now < self._ready_at.get(host, now):
                return
            self._ready_at[host] = now + _PAUSE_S
            start = Start(f"{host}/copies", host, 0, None)
            self._output.label(start.worker, start.worker)
            try:
                self._processes[host] = self._starter.start(
                    start, self._given(start), self._output, lambda code: self._ended(host, code)
                )
            except OSError as error:
                self._output.say(f"the copy server of {host} cannot be started: {error}")

    def answer(self, request: WorkerRequest) -> None:
        """Answer with the address of each server, by host: to a server, which sends its own, or to a
        worker, whose host gets one.
        """
        host = host_of(request.content["worker"])
        address = request.content["address"]
        if address is None:
            self.ensure(host)
        with self._lock:
            if address is not None and host in self._processes:
                self._addresses[host] = address
            request.answer({"copies": dict(self._addresses), "step": self.step})

    def _ended(self, host: str, code: int | None) -> None:
        with self._lock:
            self._processes.pop(host, None)
            self._addresses.pop(host, None)
            if not self._is_closed:
                how = describe(code, "the ssh connection to its host broke, or could not be made")
                self._output.say(f"the copy server of {host} {how}: the copies there are lost")

    def close(self) -> None:
        """Kill them."""
        with self._lock:
            self._is_closed = True
            left = list(self._processes.values())
        for process in left:
            process.send(signal.SIGKILL)
