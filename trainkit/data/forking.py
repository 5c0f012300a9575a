"""Loader workers on Python 3.10 and 3.11, where a child may never return from fork(): it is ended,
and forked again.

A C++ thread that takes the GIL (Gloo's after a sum, Horovod's, autograd's) first registers with the
interpreter, under a lock but without the GIL. If the rank forks at that moment, the child waits for
that lock forever: these versions take it in the child before they renew it (PyOS_AfterFork_Child;
3.12 renews it first). A worker that hangs there has touched nothing yet, so another one can take
its place.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

from torch.utils.data import DataLoader

from trainkit.console import warning
from trainkit.errors import DataError

# a worker answers within milliseconds; one that is late is replaced as well, before it has begun
ANSWER_S = 10.0
_TRIES = 5


class _AnsweringWorker(ForkProcess):
    """A process that reports its return from fork(), and begins after an answer."""

    ends: tuple[socket.socket, socket.socket]  # the rank's, the worker's

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # what Process.start calls
        for _ in range(_TRIES):
            ours, theirs = process_obj.ends = socket.socketpair()
            started = Popen(process_obj)
            theirs.close()
            with ours:
                ours.settimeout(ANSWER_S)
                try:
                    if ours.recv(1):  # else it has died, which the loader reports
                        ours.send(b".")
                    return started
                except TimeoutError:
                    os.kill(started.pid, signal.SIGKILL)
                    started.wait()
                    started.close()
            warning(
                f"A loader worker did not return from fork() within {ANSWER_S:g} s and is replaced:"
                f" a fault of Python {sys.version_info[0]}.{sys.version_info[1]} that 3.12 does not"
                " have."
            )
        raise DataError(
            f"{_TRIES} loader workers in turn did not return from fork(). Use Python 3.12, which"
            " does not have this fault, or load without workers: data.num_workers=0 (DataLoader:"
            " num_workers=0)."
        )

    def run(self) -> None:
        """In the worker: report, wait for the answer, and work."""
        ours, theirs = self.ends
        ours.close()
        with theirs:
            theirs.send(b".")
            if not theirs.recv(1):
                return  # the rank has ended
        super().run()


class _AnsweringContext(ForkContext):
    Process = _AnsweringWorker


def fork_safely(loader: DataLoader[Any]) -> None:
    """Let workers that hang in fork() be replaced,
    if Python has that fault and the user chose no other start of processes.
    """
    forks = multiprocessing.get_start_method(allow_none=True) in (None, "fork")
    if (
        sys.version_info < (3, 12)
        and loader.num_workers
        and loader.multiprocessing_context is None
        and forks
    ):
        loader.multiprocessing_context = _AnsweringContext()
