"""Runs `python -m trainkit ...` in a fork of a process that has imported torch and Hydra already.

Most commands of the tests train for two steps: their imports take longer than their work. Only plain commands are run so,
`python -m trainkit WORD ...` of one process with the usual environment; all others start as a user's do. The fork ends as a
Python program ends, with its exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_SHELL = set("|&;<>$`*?~\n#(){")  # a word with one of these, unquoted, needs a shell
_START = ["python", "-m", "trainkit"]


def words_of(line: str) -> list[str] | None:
    """Return a command's arguments after `python -m trainkit`; None if it needs a shell or another start."""
    unquoted, quote = "", ""
    for letter in line:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            unquoted += letter
    if _SHELL & set(unquoted) or "$" in line or "`" in line or "\\" in line:
        return None
    words = shlex.split(line)
    return words[3:] if words[:3] == _START else None


class Forks:
    """A process that waits for commands, one at a time. Started by the first; ends with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forked", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self.close)

    def run(
        self, words: list[str], cwd: Path, env: dict[str, str], timeout_s: float, before_kill: Callable[[int], None]
    ) -> tuple[int | None, str, str]:
        """Return exit code (None: it was killed after `timeout_s`), standard output and error of a command."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            with tempfile.TemporaryFile("w+") as request:  # may be longer than a socket takes at once
                json.dump({"words": words, "cwd": str(cwd), "env": env}, request)
                request.flush()
                socket.send_fds(self.socket, [b"."], [request.fileno(), out.fileno(), err.fileno()])
            pid = int(self._line())
            self.socket.settimeout(timeout_s)
            code: int | None = None
            try:
                code = int(self._line())
            except TimeoutError:
                before_kill(pid)
                os.killpg(pid, signal.SIGKILL)
                self.socket.settimeout(None)
                self._line()
            self.socket.settimeout(None)
            with contextlib.suppress(OSError):  # loader workers that outlived it
                os.killpg(pid, signal.SIGKILL)
            return code, _text(out), _text(err)

    def close(self) -> None:
        """End the process."""
        self.socket.close()
        self.process.wait()

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            got = self.socket.recv(1)
            if not got:
                raise RuntimeError(f"the process that runs commands ended with {self.process.wait()}")
            line += got
        return line.decode()


def _text(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()


def _serve(connection: socket.socket) -> None:
    """Fork once for each request; return in the fork, in the command's folder and environment."""
    while True:
        _, fds, _, _ = socket.recv_fds(connection, 1, 3)
        if not fds:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            _become(*fds)
            connection.close()
            return
        for fd in fds:
            os.close(fd)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request_fd: int, out: int, err: int) -> None:
    """Be the process that a shell would have started for the command."""
    os.setsid()
    os.lseek(request_fd, 0, os.SEEK_SET)
    with os.fdopen(request_fd) as file:
        request = json.load(file)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    main = sys.modules["trainkit.__main__"]
    sys.modules["__main__"] = main
    sys.argv = [str(main.__file__), *request["words"]]
    sys.path[0] = request["cwd"]


def _called() -> int:
    """Run the command; return its exit code."""
    try:
        return int(sys.modules["trainkit.__main__"].main())
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _end(code: int) -> None:
    """End as Python does, with other threads and exit handlers, but without taking all modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _import_all() -> None:
    """Import what a fit imports of others, and the commands; no recipe: a user's folder may have one of its name."""
    import hydra  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import rich.progress  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import torchvision  # noqa: F401

    import trainkit.__main__
    import trainkit.cli.run
    import trainkit.trainer  # noqa: F401


if __name__ == "__main__":
    _import_all()
    gc.freeze()  # what is imported is not looked at again in each fork
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _end(_called())
