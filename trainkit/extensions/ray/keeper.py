"""A slot of a Ray cluster: an actor that starts one worker at a time as its child, copies its
output, and signals it.

The worker is a child and not the actor itself: exit codes and signals keep their meaning (Ray hides
codes, and signal handlers need the main thread), and a killed worker is replaced without a new
actor. If the actor is killed, reaper.py ends the child.

Ray gets this module by value: the actor starts on a node without trainkit too, and can report that.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import IO, Any

_SIOCGIFADDR = 0x8915  # linux/sockios.h
# time for the output of an ended worker, as its children in other sessions may hold its pipes
_DRAIN_S = 2.0
# Run with a worker's environment and folder: what it would find there.
_LOOK = """
import importlib.metadata, importlib.util, json, platform
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
print(json.dumps({"trainkit": there("trainkit"), "horovod": version("horovod") if there("horovod.torch") else "",
    "python": platform.python_version()}))
"""


class Keeper:
    """To be made an actor with several threads: `run` takes one while its worker lives.

    Args:
        reaper: the text of reaper.py.
        folder: the folder for workers; if it does not exist on this node, or for None, the actor's
            own.
        address: this node's: the interface that has it is Gloo's and NCCL's here.
    """

    def __init__(self, reaper: str, folder: str | None, address: str) -> None:
        command = [sys.executable, "-S", "-E", "-c", reaper]
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._folder = folder if folder is not None and os.path.isdir(folder) else os.getcwd()
        self._interface = interface_of(address)
        self._lock = threading.Lock()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        # workers that were sent SIGKILL or SIGTERM before they were started
        self._early: set[str] = set()

    def look(self, environ: Mapping[str, str], token: str | None) -> dict[str, Any]:
        """Return what a worker would find here:
        versions, its folder, whether the driver's file `token` is there.
        """
        command = [sys.executable, "-c", _LOOK]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=os.environ | dict(environ),
            capture_output=True,
            text=True,
            check=False,
        )
        facts = (
            json.loads(done.stdout.splitlines()[-1])
            if done.returncode == 0
            else {"error": done.stderr[-500:]}
        )
        sees = token is None or os.path.exists(os.path.join(self._folder, token))
        return facts | {"folder": self._folder, "token": sees, "pid": os.getpid()}

    def run(
        self, worker: str, command: Sequence[str], environ: Mapping[str, str], call: bytes | None
    ) -> Iterator[tuple[str, bytes | int]]:
        """Start a worker; yield ("stdout" | "stderr", bytes) as they come, ("result", bytes) if it
        left one, ("code", code).

        Args:
            worker: its name at the driver.
            command: a first word "python" means this actor's Python, which a runtime_env may have
                chosen.
            environ: is added to the actor's own, which holds Ray's CUDA_VISIBLE_DEVICES.
            call: what the worker is to find in the file TRAINKIT_CALL/call, or None.
        """
        full_command = [
            sys.executable if i == 0 and word == "python" else word
            for i, word in enumerate(command)
        ]
        given = os.environ | dict(environ)
        here = {"HOROVOD_GLOO_IFACE": self._interface}
        if "NCCL_SOCKET_IFNAME" not in given:  # it may be another one than Gloo's
            here["NCCL_SOCKET_IFNAME"] = self._interface
        scratch = tempfile.mkdtemp(prefix="trainkit-call-") if call is not None else ""
        if call is not None:
            here["TRAINKIT_CALL"] = scratch
            with open(os.path.join(scratch, "call"), "wb") as file:
                file.write(call)
        try:
            yield from self._follow(worker, full_command, given | here)
            if scratch and os.path.exists(os.path.join(scratch, "result")):
                with open(os.path.join(scratch, "result"), "rb") as file:
                    yield "result", file.read()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        yield "code", self._code

    def send(self, worker: str, number: int) -> None:
        """Send a signal to a worker and all that it started."""
        with self._lock:
            process = self._workers.get(worker)
            if process is None:
                self._early.add(worker)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _follow(
        self, worker: str, command: Sequence[str], environ: Mapping[str, str]
    ) -> Iterator[tuple[str, bytes]]:
        pipe = subprocess.PIPE
        with self._lock:
            if worker in self._early:
                self._code = -signal.SIGTERM
                return
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
            self._workers[worker] = process
        self._report("+", process.pid)
        chunks: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        copies = []
        for name, end in (("stdout", process.stdout), ("stderr", process.stderr)):
            copies.append(threading.Thread(target=_copy, args=(name, end, chunks), daemon=True))
            copies[-1].start()
        threading.Thread(
            target=self._wait, args=(worker, process, copies, chunks), daemon=True
        ).start()
        while (chunk := chunks.get())[0]:
            yield chunk

    def _wait(
        self,
        worker: str,
        process: subprocess.Popen[bytes],
        copies: Sequence[threading.Thread],
        chunks: SimpleQueue[tuple[str, bytes]],
    ) -> None:
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                del self._workers[worker]
                self._early.add(worker)  # later signals have no receiver
                with contextlib.suppress(ProcessLookupError):
                    # its children; wait() has not freed the number yet
                    os.killpg(process.pid, signal.SIGKILL)
                self._code = process.wait()
            self._report("-", process.pid)
            for copy in copies:
                copy.join(_DRAIN_S)
        finally:
            # the stream ends whatever happens here; Ray shows an exception of this thread
            chunks.put(("", b""))

    def _report(self, sign: str, group: int) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.write(f"{sign}{group}\n")
            self._reaper.stdin.flush()


def _copy(name: str, end: IO[bytes], chunks: SimpleQueue[tuple[str, bytes]]) -> None:
    with end:
        while chunk := end.read1(2**16):  # type: ignore[attr-defined]
            chunks.put((name, chunk))


def interface_of(address: str) -> str:
    """Return the interface that has this address, or the loopback one."""
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            if (
                socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
                == address
            ):
                return name
    return "lo"
