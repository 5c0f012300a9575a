"""Runs Python programs of tests as forks of a process that has imported torch, Horovod and Hydra
already (fork_server.py).

Most programs of the tests train for two steps: their imports take longer than their work. `Forks`
is a folder for the front of PATH: its `python`, `horovodrun` and `torchrun` hand arguments,
environment and descriptors to the server, which forks; each then passes on signals and ends as its
fork did. A rank of a launcher, too, is such a fork. What `python` cannot hand over (options, a
program on stdin, settings that Python reads at its start, or a library as it is imported) runs as
usual.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SHARED = "TRAINKIT_TEST_FORKS"  # names a server that several processes use
# A file of a command's environment: the seconds of processors that each fork used, a line each.
USED = "TRAINKIT_TEST_FORKS_USED"
READY = "ready"  # a file of the folder
LAUNCHERS = {
    "horovodrun": "horovod.runner.launch:run_commandline",
    "torchrun": "torch.distributed.run:main",
}
# in another one, a fork from here would be elsewhere
_NAMESPACES = ("net", "mnt", "pid", "ipc", "user", "uts")
# Isolated and without site: it starts in a hundredth of a second.
_STUB = """\
#!{python} -ISE
import json, os, resource, signal, socket, sys

name, words, env = {name!r}, sys.argv[1:], dict(os.environ)
if words[:1] == ["-u"]:
    words, env["PYTHONUNBUFFERED"] = words[1:], "1"
read_at_start = ("PYTHONWARNINGS", "PYTHONHASHSEED", "PYTHONSAFEPATH", "LD_PRELOAD", "HF_ENDPOINT", "HF_HOME")
plain = not any(os.environ.get(key) for key in read_at_start)
here = all(os.readlink(f"/proc/self/ns/{{kind}}") == known for kind, known in {namespaces!r}.items())
# programs of others may pass descriptors on, or take their process id for that of the fork
ours = ("trainkit", "torch.distributed.run", "horovod.runner.launch", "benchmarks", "recipes", "tests")
named = bool(words) and (
    words[0] == "-m" and "".join(words[1:2]).startswith(ours)
    or words[0][0] != "-" and os.path.isfile(words[0])
)
if not plain or not here or name == "python" and not named:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
request = os.memfd_create("request")
os.write(request, json.dumps({{
    "name": name, "words": words, "cwd": os.getcwd(), "env": env, "umask": os.umask(0),
    "affinity": list(os.sched_getaffinity(0)),
    "limits": {{limit: resource.getrlimit(limit) for limit in range(16)}}}}).encode())
while True:
    try:
        server.connect({address!r})
        break
    except BlockingIOError:
        pass
signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
socket.send_fds(server, [b"."], [request, 0, 1, 2])
child = int(server.makefile().readline())
def forward(number, _):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
for number in signals:
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = int(server.makefile().readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Forks:
    """A server, and the folder of programs that it runs.

    Args:
        log: what the server prints goes there; this process's stderr if left out.
        environment: variables of the server; a fork has those of its request.

    Attributes:
        folder: goes to the front of PATH.
        pid: the server; its children are the forks.
    """

    def __init__(self, log: TextIO | None = None, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trainkit-forks-"))
        address = self.folder / "socket"
        for name in ("python", "python3", *LAUNCHERS):
            real = BIN / name
            stub = self.folder / name
            program = "python" if name.startswith("python") else name
            stub.write_text(
                _STUB.format(
                    python=sys.executable,
                    name=program,
                    real=str(real),
                    address=str(address),
                    namespaces={kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES},
                )
            )
            stub.chmod(0o755)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(address))
        listener.listen(64)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
        env |= environment
        # a session of its own: Ctrl-C is for the process that closes it
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.fork_server",
                str(listener.fileno()),
                str(self.folder),
            ],
            pass_fds=[listener.fileno()],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        listener.close()
        self.pid = self._process.pid
        atexit.register(self.close)

    @property
    def named(self) -> str:
        """What SHARED is for the processes that use this server too."""
        return f"{self.pid}:{self.folder}"

    def close(self) -> None:
        """End the server, and with it all forks."""
        try:
            self._process.communicate(timeout=20)  # closes its stdin
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def own() -> Forks:
    """Return the server of this process, also after a fixture has put the environment back."""
    return Forks()


def server() -> tuple[int, Path]:
    """Return the process id and the folder of the server that the environment names, or of one for
    this process, which it then names. Its first imports, which are no part of a command's time
    limit, are done.

    Raises:
        ProcessLookupError: the server has ended.
    """
    if not os.environ.get(SHARED):
        os.environ[SHARED] = own().named
    pid, _, folder = os.environ[SHARED].partition(":")
    with os.fdopen(os.pidfd_open(int(pid))) as end:
        while not (Path(folder) / READY).exists():
            if select.select([end], [], [], 0.05)[0]:
                raise ProcessLookupError(f"The server of forks has ended: {pid}")
    return int(pid), Path(folder)
