"""Loader workers: their start, and signals that a scheduler sends to every process of a job.

By default a SIGTERM, SIGUSR1 or Ctrl-C kills the worker, while its rank continues to the end of the
step; the rank would then fail for lack of data instead of saving.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from trainkit.console import plural
from trainkit.data.forking import fork_safely
from trainkit.errors import DataError

LOOK_S = 5.0  # seconds between two looks of a worker that got a SIGTERM: is its rank still there?


class Shielded:
    """A worker_init_fn that keeps signals from ending the worker, and then calls the user's own.

    A scheduler's SIGTERM to the worker is the rank's to answer. The rank's own, when it exits, ends
    the worker, even one that waits for a store: it is silent, so that the rank's error is the last
    that is printed.
    """

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
        if self.own is not None:
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


def shield(data: Any) -> Any:
    """Return `data`; if it is a DataLoader, its workers will be shielded."""
    if isinstance(data, DataLoader) and not isinstance(data.worker_init_fn, Shielded):
        data.worker_init_fn = Shielded(data.worker_init_fn)
    return data
