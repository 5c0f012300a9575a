"""Keeps a process from forking while its threads fetch: a child forked meanwhile may never return from fork().

A DataLoader forks its workers, and another library's fork handlers wait for locks that such a thread held: seen as a worker of
validation that hung in fork() while shards were fetched ahead, in one of some twenty runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class Gate:
    """Lets work of threads in while no fork is made, and a fork while no such work is done."""

    def __init__(self) -> None:
        self._open()
        os.register_at_fork(before=self._close, after_in_parent=self._reopen, after_in_child=self._open)

    def _open(self) -> None:
        self._changed = threading.Condition()
        self._working = self._forking = 0

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Within the context a fork waits."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._working)

    def _reopen(self) -> None:
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()


GATE = Gate()  # of the process: handlers of forks are
