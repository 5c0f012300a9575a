"""Connections that pause between two requests, as those of heartbeats do: one thread waits for all,
and answers them. A thread for each would be woken for each heartbeat, a thousand in a large job, and
those of a burst would wait for one another.

    SignedHandler.pauses    the request was a heartbeat: the connection's own thread ends
    Pauses                  answers the next one, if it has come whole; any other gets a thread again
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trainkit.safety.threads import printed, start_thread

_LONGEST = 65536  # bytes of a request that is answered here, its head with it
_PROMPT_S = 1.0  # a client that takes no answer for longer loses its connection
_LOOK_S = 1.0  # between two looks at what is silent


class Pausing(Protocol):
    """What answers the requests of a connection (handler.py)."""

    connection: socket.socket
    command: str
    path: str
    timeout: float | None  # seconds after which a silent connection is closed


class Pauses:
    """The connections of a server that pause.

    Args:
        answer: answers a request that has come whole, and returns whether its connection pauses.
        resume: starts a thread for a connection: another kind of request has come, or a part of
            one, it has closed, or it was silent for too long.
    """

    def __init__(
        self, answer: Callable[[Pausing], bool], resume: Callable[[Pausing], object]
    ) -> None:
        self._answer, self._resume = answer, resume
        self._selector = selectors.DefaultSelector()
        self._since: dict[Pausing, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, handler: Pausing) -> None:
        """Answer the further requests of a connection."""
        handler.connection.settimeout(_PROMPT_S)
        with self._lock:
            self._since[handler] = time.monotonic()
            self._selector.register(handler.connection, selectors.EVENT_READ, handler)
            if self._thread is None:
                again = printed("The driver answers heartbeats again.", retry_s=0.1)
                self._thread = start_thread("heartbeats", self._run, again)

    def close(self) -> None:
        """End the thread, within a second."""
        self._is_closed = True

    def _run(self) -> None:
        look_at = time.monotonic() + _LOOK_S
        while not self._is_closed:
            for key, _ in self._selector.select(_LOOK_S):
                self._serve(key.data)
            if (now := time.monotonic()) < look_at:
                continue
            look_at = now + _LOOK_S
            for handler, since in [*self._since.items()]:
                if handler.timeout is not None and now - since > handler.timeout:
                    self._give_back(handler)
        for handler in [*self._since]:
            self._give_back(handler)

    def _serve(self, handler: Pausing) -> None:
        self._since[handler] = time.monotonic()
        if not _is_whole(handler) or not self._answer(handler):
            self._give_back(handler)

    def _give_back(self, handler: Pausing) -> None:
        with self._lock:
            self._selector.unregister(handler.connection)
            del self._since[handler]
        handler.connection.settimeout(handler.timeout)
        self._resume(handler)


def _is_whole(handler: Pausing) -> bool:
    """Return whether a request like the last one can be read without waiting."""
    try:
        text = handler.connection.recv(_LONGEST, socket.MSG_PEEK)
    except OSError:
        return False
    head, end, body = text.partition(b"\r\n\r\n")
    if not end or not head.startswith(f"{handler.command} {handler.path} ".encode()):
        return False
    length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
    return length.isdigit() and len(body) == int(length)
