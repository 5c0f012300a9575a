"""Loader workers and signals: a scheduler signals every process of a job, and a run ends in good order with its workers.

Left alone, a worker dies of the SIGTERM, SIGUSR1 or Ctrl-C that its rank takes for the wish to end at the next step, and
the rank then fails for want of data in place of saving.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

# A worker that its loader terminates, since it did not end in time, lives on for so long at most.
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
    """Return `data`; where it is a DataLoader, its workers will be shielded."""
    if isinstance(data, DataLoader) and not isinstance(data.worker_init_fn, Shielded):
        data.worker_init_fn = Shielded(data.worker_init_fn)
    return data


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(GRACE_S)  # whose own action is to end the process
