"""Worker processes: each in its own process group, on this host or, by ssh, on another one."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

from trainkit.extensions.elastic import reaper as reaper_program
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.remote import first_lines, ssh_command
from trainkit.safety.threads import OnError, printed, start_thread

_SSH_S = 5.0  # time for ssh to end after its worker was sent SIGKILL

# Called with the exit code in the state machine's form: minus a signal's number, None for a lost
# connection.
OnExit = Callable[[int | None], None]


class Reaper:
    """The process that ends this host's workers if the driver is killed (reaper.py)."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", str(Path(reaper_program.__file__))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lock = threading.Lock()

    def tell(self, sign: str, group: int) -> None:
        """Report that a process group has started ("+") or ended ("-")."""
        assert self._process.stdin is not None
        # a killed reaper: the driver still works
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{sign}{group}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Let the reaper exit; all workers have ended."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class Process:
    """A worker's process on this host, with this complete environment; base of the remote one."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> None:
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(
            command, env=environ, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._lock = threading.Lock()
        self._ended = False

    def follow(self, worker: str, output: WorkerOutput, reaper: Reaper, on_exit: OnExit) -> None:
        """Copy its output, and call `on_exit` from another thread as soon as it ends."""
        assert self.popen.stdout is not None and self.popen.stderr is not None
        reaper.tell("+", self.popen.pid)
        output.follow(worker, self.popen.stdout, self.popen.stderr)

        def wait() -> None:
            os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._ended = True
                with contextlib.suppress(ProcessLookupError):
                    # its children; wait() has not freed the number yet
                    os.killpg(self.popen.pid, signal.SIGKILL)
                code = self.popen.wait()
            reaper.tell("-", self.popen.pid)
            on_exit(self._ended_with(code))

        lost = printed(f"Worker {worker} counts as lost.", then=lambda: on_exit(None))
        start_thread(f"wait {worker}", wait, lost)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its children."""
        with self._lock:
            if not self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, number)

    def _ended_with(self, code: int) -> int | None:
        return code_of(code)


class RemoteProcess(Process):
    """A worker's process on another host (remote.py), to which `environ` is sent."""

    def __init__(
        self,
        host: str,
        port: int | None,
        identity_file: str | None,
        command: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        mark = f"go-{secrets.token_hex(8)}"
        host_keys = os.environ.get("TRAINKIT_SSH_HOST_KEYS", "accept-new")
        super().__init__(
            ssh_command(host, port, identity_file, mark, host_keys), os.environ, subprocess.PIPE
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._lines.put(first_lines(environ, os.getcwd(), command, mark))
        broken = printed(f"The ssh connection to {host} is closed.", then=self.popen.kill)
        start_thread(f"ssh {host}", self._write, broken)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its children."""
        self._lines.put(f"{number.name.removeprefix('SIG')}\n")
        if number == signal.SIGKILL:
            kill = functools.partial(super().send, number)  # the host may be down
            start_timer(
                "kill ssh",
                _SSH_S,
                kill,
                printed(f"ssh, process {self.popen.pid}, may still run: kill it."),
            )

    def _write(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError), self.popen.stdin as stdin:  # an error: ssh has ended
            while line := self._lines.get():
                stdin.write(line.encode())
                stdin.flush()

    def _ended_with(self, code: int) -> int | None:
        self._lines.put("")  # ends _write
        was_signalled = code < 0 and code != -signal.SIGKILL  # ssh itself, as by Slurm
        return None if code == 255 or was_signalled else code_of(code)


def code_of(code: int) -> int:
    """Return minus the signal's number if a shell's exit code encodes a signal, 128 + number;
    other codes unchanged.
    """
    with contextlib.suppress(ValueError):
        return -signal.Signals(code - 128)
    return code


def start_timer(
    name: str, after_s: float, work: Callable[[], object], on_error: OnError
) -> threading.Thread:
    """Run `work` in a new thread after some seconds."""

    def wait() -> None:
        time.sleep(after_s)
        work()

    return start_thread(name, wait, on_error)
