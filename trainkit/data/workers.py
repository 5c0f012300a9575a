"""Loader workers and signals: shields workers from the signals that a scheduler sends to every process of a job.

By default a SIGTERM, SIGUSR1 or Ctrl-C kills the worker, while its rank continues to the end of the step; the rank would
then fail for lack of data instead of saving.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

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


def shield(data: Any) -> Any:
    """Return `data`; if it is a DataLoader, its workers will be shielded."""
    if isinstance(data, DataLoader) and not isinstance(data.worker_init_fn, Shielded):
        data.worker_init_fn = Shielded(data.worker_init_fn)
    return data


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_S)  # SIGALRM's default action ends the process
