"""Background: a thread per logger that does its work in order,
so that training never waits for a disk or a network.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.console import warning
from trainkit.errors import TrainkitError
from trainkit.safety.threads import printed, start_thread

ROOM = 10_000  # queue size in entries; an entry is the values of one step


@dataclass(frozen=True)
class _Entry:
    what: str  # names the work in an error message
    work: Callable[[], object]
    always: bool = False  # also after a failure


class Background:
    """Takes entries without blocking. The first failure ends this logger's work and is reported;
    the run continues.

    Args:
        name: name of the logger, for messages.
        flush: called in the thread after work, if the queue is empty.
        get_on: called while training waits for the thread, so that a slow disk does not count as a
            hang.
        room: queue size; entries that do not fit are dropped and counted.

    Attributes:
        mistake: an error in the settings, found in the thread and to be raised by the main thread.
        dropped: number of dropped entries.
        is_open: whether the logger's `open` has returned.
        is_whole: whether the run has ended well.
        position: returns the run's step and epoch.
        facts: of the run (RunFacts).
    """

    position: Callable[[], tuple[int, int]]
    facts: Any

    def __init__(
        self, name: str, flush: Callable[[], None], get_on: Callable[[], None], room: int = ROOM
    ) -> None:
        self.mistake: TrainkitError | None = None
        self.dropped = 0
        self.is_open = self.is_whole = False
        self._name = name
        self._flush = flush
        self._get_on = get_on
        self._room = room
        self._failed = self._abandoned = False
        self._doing = "waiting"
        self._queue: queue.Queue[_Entry | None] = queue.Queue(room)
        # A daemon thread: a network that never answers does not keep the process alive.
        effect = f"{name} logs nothing from here on; training continues."
        self._thread = start_thread(
            f"trainkit-{name}", self._run, printed(effect, then=self._refuse)
        )

    def put(self, what: str, work: Callable[[], object]) -> bool:
        """Queue work; return whether it was accepted."""
        if self._failed:
            return False
        try:
            self._queue.put_nowait(_Entry(what, work))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until all queued work is done; return whether it is."""
        deadline, done = time.monotonic() + timeout_s, threading.Event()

        def mark() -> None:
            try:
                self._flush()
            finally:
                done.set()

        if not self._put_by(_Entry("flushing", mark, always=True), deadline):
            return False
        return self._wait(done.wait, done.is_set, deadline)

    def close(self, last: Callable[[], object], timeout_s: float) -> None:
        """Run `last` after all queued work, and end the thread;
        report entries dropped or not finished in time.
        """
        deadline = time.monotonic() + timeout_s
        ended = self._put_by(_Entry("closing", last, always=True), deadline) and self._put_by(
            None, deadline
        )
        if not ended or not self._wait(
            self._thread.join, lambda: not self._thread.is_alive(), deadline
        ):
            self._abandoned = True
            left = self._queue.qsize()
            warning(
                f"{self._name} did not finish within {timeout_s:g} s: it was still {self._doing}."
                f" Values not written yet are lost (queued entries: {left})."
            )
        if self.dropped:
            warning(
                f"{self._name} did not keep up: {self.dropped} entries were dropped (its queue"
                f" holds {self._room}). Log less often: raise trainer.log_every_n_steps."
            )

    def _put_by(self, entry: _Entry | None, deadline: float) -> bool:
        try:
            self._queue.put(entry, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        return True

    def _wait(
        self, wait: Callable[[float], object], is_over: Callable[[], bool], deadline: float
    ) -> bool:
        while not is_over() and (left := deadline - time.monotonic()) > 0:
            wait(min(1.0, left))
            self._get_on()
        return is_over()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            if self._abandoned:
                return
            self._doing = entry.what
            if self._failed:
                if entry.always:
                    # the first failure was reported; files and connections still close
                    with contextlib.suppress(Exception):
                        entry.work()
                continue
            try:
                entry.work()
                if self._queue.empty() and not entry.always:
                    self._flush()
            except Exception as error:
                # a disk, a network or a library may raise anything; the run continues
                self._fail(entry, error)

    def _refuse(self) -> None:
        self._failed = True

    def _fail(self, entry: _Entry, error: Exception) -> None:
        self._failed = True
        if self._abandoned:
            return
        if isinstance(error, TrainkitError):
            self.mistake = error
            return
        warning(
            f"{self._name} failed while {entry.what}: {type(error).__name__}: {error}\n"
            f"{self._name} logs nothing from here on; training continues."
        )
