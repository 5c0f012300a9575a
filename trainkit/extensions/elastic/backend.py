"""What the driver asks of the place where its workers run: to start them, and to name the hosts.

Backend, Started        starts workers, sends them signals: HostBackend here and by ssh, RayBackend (extensions/ray) in actors
HostSource              names the hosts: a discovery script (hosts.py), or Ray's placement groups
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from trainkit.extensions.elastic.messages import Start
from trainkit.extensions.elastic.options import Settings, worker_environment
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.processes import OnExit, Process, Reaper, RemoteProcess
from trainkit.launch.network import is_local


class Started(Protocol):
    """A worker that was started."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all its child processes."""


class Backend(Protocol):
    """Starts workers."""

    def start(
        self, start: Start, given: Mapping[str, str], output: WorkerOutput, on_exit: OnExit
    ) -> Started:
        """Start a worker, copy its output, and call `on_exit` from another thread as soon as it
        ends.

        Args:
            start: what to start, and where.
            given: the job's variables, for the worker's environment.
            output: takes the worker's output.
            on_exit: takes the exit code.

        Raises:
            OSError: it cannot be started.
        """

    def of_command(self, command: Sequence[str]) -> Backend | None:
        """Return a backend that starts another command on the same hosts, and ends with this one;
        None if there is none.
        """

    def close(self) -> None:
        """Release what the backend holds; all workers have ended."""


class HostSource(Protocol):
    """Names the hosts and their slots while the job runs."""

    def watch(
        self,
        known: dict[str, int],
        on_change: Callable[[dict[str, int]], None],
        say: Callable[[str], None],
    ) -> None:
        """Call `on_change` from another thread whenever the hosts differ from the last ones,
        at first from `known`.
        """


class HostBackend:
    """Workers as processes of this host, or, by ssh, of another one."""

    def __init__(self, settings: Settings, reaper: Reaper | None = None) -> None:
        self._settings = settings
        self._reaper = reaper or Reaper()

    def start(
        self, start: Start, given: Mapping[str, str], output: WorkerOutput, on_exit: OnExit
    ) -> Started:
        """See Backend."""
        settings = self._settings
        environ = worker_environment(settings, given)
        if is_local(start.host):
            process = Process(settings.command, environ)
        else:
            ssh = settings.ssh_port, settings.ssh_identity_file
            process = RemoteProcess(start.host, *ssh, settings.command, environ)
        process.follow(start.worker, output, self._reaper, on_exit)
        return process

    def of_command(self, command: Sequence[str]) -> Backend:
        """See Backend."""
        return HostBackend(replace(self._settings, command=tuple(command)), self._reaper)

    def close(self) -> None:
        """See Backend."""
        self._reaper.close()
