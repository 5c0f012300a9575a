"""Loader workers: their start, and signals that a scheduler sends to every process of a job.

By default a SIGTERM, SIGUSR1 or Ctrl-C kills the worker, while its rank continues to the end of the
step; the rank would then fail for lack of data instead of saving.

A forked worker has the rank's open files, those of its GPU's driver too: as long as it lives, the
memory of a killed rank stays allocated, and the next attempt on the host meets a full GPU. So the
kernel ends the worker with its rank, and the worker lets go of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from trainkit.console import plural
from trainkit.data.forking import fork_safely
from trainkit.errors import DataError, TrainkitError
from trainkit.safety.threads import printed, start_thread

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GPU_FILES = "/dev/nvidia"  # how the names of the driver's files begin
_ENDING_S = 20.0  # from the end of a killed process's connections to its own, on a busy machine
LOOK_S = 5.0  # seconds between two looks of a worker that got a SIGTERM: is its rank still there?


class Shielded:
    """A worker_init_fn that keeps signals from ending the worker, and then calls the user's own.

    A scheduler's SIGTERM to the worker is the rank's to answer. The rank's own, when it exits, ends
    the worker, even one that waits for a store: it is silent, so that the rank's error is the last
    that is printed.

    Attributes:
        dies_with_rank: whether the kernel may kill the worker when the thread that starts it ends:
            if that is the rank's main thread.
    """

    dies_with_rank = False

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own
        # readable, once the rank exits or needs no more batches
        self._exits, exits = multiprocessing.Pipe(duplex=False)
        # runs before multiprocessing ends the workers
        Finalize(self, exits.send_bytes, args=(b".",), exitpriority=0)

    def __getstate__(self) -> dict[str, Any]:
        is_worker = get_spawning_popen() is not None  # else a copy without a loader's workers
        return self.__dict__ if is_worker else {"own": self.own, "_exits": None}

    def __call__(self, worker: int) -> None:
        """Run in the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._rank = os.getppid()
        signal.signal(signal.SIGTERM, self._end_with_rank)
        signal.signal(signal.SIGALRM, self._end_with_rank)
        if sys.platform == "linux":
            _let_go_of_gpus()
            if self.dies_with_rank:
                _die_with(self._rank)
        rank = multiprocessing.parent_process()
        if rank is not None and rank.pid != self._rank:
            _die_with_maker(rank.sentinel)
        if self.own is not None:
            info: Any = get_worker_info()
            # the worker itself reads by a reference of its own
            while getattr(type(info.dataset), "reads_users", False):
                object.__setattr__(info, "dataset", info.dataset.dataset)
            self.own(worker)

    def _end_with_rank(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._rank or (self._exits is not None and self._exits.poll()):
            os._exit(0)  # any other end of a worker is an error to its loader
        signal.setitimer(signal.ITIMER_REAL, LOOK_S)


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader, the workers of which need files and shared memory.

    Each batch of a worker is a few open files, and a worker that cannot open one is silent: the
    soft limit is raised to the hard one, as a process may.

    Raises:
        DataError: there is no room for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if loader.num_workers and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fork_safely(loader)
    if isinstance(loader.worker_init_fn, Shielded):
        # PR_SET_PDEATHSIG means the thread
        is_main = threading.current_thread() is threading.main_thread()
        loader.worker_init_fn.dies_with_rank = is_main
    try:
        return iter(loader)
    except OSError as error:
        cure = {
            errno.ENOSPC: (
                "/dev/shm is full. Free it (df -h /dev/shm), or give a container more (docker run"
                " --shm-size=8g)."
            ),
            errno.EMFILE: f"a process may have {hard} open files. Raise the limit (ulimit -n).",
        }.get(error.errno or 0)
        if cure is None:
            raise
        raise DataError(
            f"The {plural(loader.num_workers, 'loader worker')} cannot be started: {cure} Or load"
            " without workers: data.num_workers=0 (DataLoader: num_workers=0)."
        ) from error


def named_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """Raise trainkit's errors from worker processes with their own message,
    without the worker's traceback; and if a worker ended while it handed a batch over, torch's error
    of a worker that ended.
    """
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:
        is_of_data = "in DataLoader worker process" in str(error)
        if is_of_data or not (pids := ended_workers(batches)):
            raise
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
    except TrainkitError as error:
        text = str(error)
        if not text.startswith("Caught "):
            raise
        raise type(error)(text.rstrip().rsplit(f"{type(error).__name__}: ", 1)[-1]) from None


def ended_workers(batches: Any) -> str:
    """Return the process ids of an iterator's workers that have ended, or are just ending."""
    workers = getattr(batches, "_workers", [])
    ending = multiprocessing.connection.wait([worker.sentinel for worker in workers], _ENDING_S)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(_ENDING_S)  # a process's files are closed a moment before it has ended
    return ", ".join(str(worker.pid) for worker in workers if not worker.is_alive())


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent has ended, also while it waits in C code or
    for a pipe.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_maker(sentinel: int) -> None:
    """End this process when the rank has ended that had it made: its parent is a fork server, which
    lives as long as any of its children.

    Args:
        sentinel: a file descriptor that is readable once the rank has ended.
    """

    def wait() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(0)

    start_thread("trainkit rank's end", wait, printed("This worker may outlive its rank."))


def _let_go_of_gpus() -> None:
    """Put /dev/null in the place of the driver's files that a fork has copied. CUDA cannot be used
    after a fork; the numbers stay taken, since its code in this process may still close them.
    """
    held = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of the listing itself
            if os.readlink(f"/proc/self/fd/{number}").startswith(_GPU_FILES):
                held.append(number)
    if held:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in held:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


def shield(data: Any) -> Any:
    """Return `data`; if it is a DataLoader, its workers will be shielded."""
    if isinstance(data, DataLoader) and not isinstance(data.worker_init_fn, Shielded):
        data.worker_init_fn = Shielded(data.worker_init_fn)
    return data
