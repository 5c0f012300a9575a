"""Background: one logger's work in a thread of its own, in order, so that training never waits for a disk or a network."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainkit.errors import TrainkitError

ROOM = 10_000  # entries that may wait; an entry is the values of one step


@dataclass(frozen=True)
class _Entry:
    what: str  # for the message, should it fail
    work: Callable[[], object]
    always: bool = False  # also after a failure


class Background:
    """Takes entries without waiting; the first that fails ends the logger's work, is told, and costs nothing else.

    Args:
        name: the logger's, for messages.
        flush: is called, in the thread, where work was done and no more is waiting.
        get_on: is called while training waits for the thread: a slow disk is no stall.
        room: entries that may wait; what does not fit is dropped and counted.

    Attributes:
        mistake: an error in the settings that came up in the thread; it is for the main thread to raise.
        dropped: how many entries were.
    """

    def __init__(self, name: str, flush: Callable[[], None], get_on: Callable[[], None], room: int = ROOM) -> None:
        self.mistake: TrainkitError | None = None
        self.dropped = 0
        self._name, self._flush, self._get_on, self._room = name, flush, get_on, room
        self._failed = self._abandoned = False
        self._doing = "waiting"
        self._queue: queue.Queue[_Entry | None] = queue.Queue(room)
        # A daemon: a network that never answers does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"trainkit-{name}", daemon=True)
        self._thread.start()

    def put(self, what: str, work: Callable[[], object]) -> bool:
        """Hand over work; return whether it was taken."""
        if self._failed:
            return False
        try:
            self._queue.put_nowait(_Entry(what, work))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is done; return whether it is."""
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
        """Do `last` behind all that waits, and end the thread; tell what was dropped or did not come to be done in time."""
        deadline = time.monotonic() + timeout_s
        ended = self._put_by(_Entry("closing", last, always=True), deadline) and self._put_by(None, deadline)
        if not ended or not self._wait(self._join, lambda: not self._thread.is_alive(), deadline):
            self._abandoned = True
            left = self._queue.qsize()
            print(
                f"{self._name} did not finish within {timeout_s:g} s: it was still {self._doing}. What it did not write yet is "
                f"lost (entries that wait: {left}).",
                flush=True,
            )
        if self.dropped:
            print(
                f"{self._name} did not keep up: {self.dropped} entries were dropped (its queue holds {self._room}). A larger "
                "trainer.log_every_n_steps gives it less to do.",
                flush=True,
            )

    def _join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _put_by(self, entry: _Entry | None, deadline: float) -> bool:
        try:
            self._queue.put(entry, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        return True

    def _wait(self, wait: Callable[[float], object], is_over: Callable[[], bool], deadline: float) -> bool:
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
                    with contextlib.suppress(Exception):  # the first failure was told; files and connections are closed
                        entry.work()
                continue
            try:
                entry.work()
                if self._queue.empty() and not entry.always:
                    self._flush()
            except Exception as error:  # whatever a disk, a network or a foreign library raises: the run is worth more
                self._fail(entry, error)

    def _fail(self, entry: _Entry, error: Exception) -> None:
        self._failed = True
        if self._abandoned:
            return
        if isinstance(error, TrainkitError):
            self.mistake = error
            return
        print(
            f"{self._name} failed while {entry.what}: {type(error).__name__}: {error}\n"
            f"{self._name} logs nothing from here on; training goes on.",
            flush=True,
        )
