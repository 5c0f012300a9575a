"""Loader workers: their start, and signals that a scheduler sends to every process of a job.

By default a SIGTERM, SIGUSR1 or Ctrl-C kills the worker, while its rank continues to the end of the step; the rank would
then fail for lack of data instead of saving.
"""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from trainkit.console import plural
from trainkit.data.forking import fork_safely
from trainkit.errors import DataError

# The longest time that a worker survives after its loader terminates it for not ending in time.
GRACE_S = 60


class Shielded:
    """A worker_init_fn that keeps signals from ending the worker, and then calls the user's own."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own

    def __call__(self, worker: int) -> None:
        """Run in the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _end_later)
        if self.own is not None:
            self.own(worker)


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator of a loader, the workers of which need files and shared memory.

    Each batch of a worker is a few open files, and a worker that cannot open one is silent: the soft limit is raised to the
    hard one, as a process may.

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
            errno.ENOSPC: "/dev/shm is full. Free it (df -h /dev/shm), or give a container more (docker run --shm-size=8g).",
            errno.EMFILE: f"a process may have {hard} open files. Raise the limit (ulimit -n).",
        }.get(error.errno or 0)
        if cure is None:
            raise
        raise DataError(
            f"The {plural(loader.num_workers, 'loader worker')} cannot be started: {cure} Or load without workers: "
            "data.num_workers=0 (DataLoader: num_workers=0)."
        ) from error


def shield(data: Any) -> Any:
    """Return `data`; if it is a DataLoader, its workers will be shielded."""
    if isinstance(data, DataLoader) and not isinstance(data.worker_init_fn, Shielded):
        data.worker_init_fn = Shielded(data.worker_init_fn)
    return data


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_S)  # SIGALRM's default action ends the process
