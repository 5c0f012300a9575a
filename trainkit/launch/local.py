"""Starting a job of several ranks on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.launch.commands import end_group

Launcher = Literal["horovodrun", "torchrun"]


def launcher_of(engine: str) -> Launcher:
    """Return who starts ranks of an engine ("auto", "horovod", "ddp"); auto is on Horovod where that is installed."""
    return "torchrun" if engine == "ddp" or importlib.util.find_spec("horovod") is None else "horovodrun"


def start_with(launcher: Launcher, ranks: int) -> list[str]:
    """Return how a command begins that runs a script, or `-m module`, with this Python on each of so many ranks.

    Modules, not the scripts `horovodrun` and `torchrun`: the PATH may lead to those of another environment.
    """
    if ranks == 1:
        return [sys.executable]
    if launcher == "torchrun":  # standalone: on a port of its own
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo", sys.executable]


def run_job(command: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
    """Run a job to its end, its output into `log`, and return its exit code; nothing that it started goes on."""
    with ended_by_signals(), log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            end_group(process)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let an end from outside run the same way out as Ctrl-C: what was started must not go on without us."""
    if threading.current_thread() is not threading.main_thread():  # who alone may choose what signals do
        yield
        return
    ending = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in ending]
    try:
        yield
    finally:
        for number, handler in zip(ending, before, strict=True):
            signal.signal(number, handler)
