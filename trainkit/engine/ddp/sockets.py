"""The sockets by which Gloo's ranks are connected, so that a rank can end its own waiting.

Gloo waits for a rank whose host is gone until a timeout of minutes: nothing closes the connection,
and abort() of its backend changes nothing (torch 2.15). A socket that is shut down here for reading ends
each operation on it at once, with the error of a closed connection. (Shut down for writing too, Gloo's
thread would end the process.)
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_OWN = "/proc/self/fd"


class Sockets:
    """Those that were opened within `opening`, by file descriptor. Linux alone: elsewhere none."""

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Record the sockets that this process opens within the context."""
        before = set(_sockets().values())
        yield
        self._opened = {
            number: inode for number, inode in _sockets().items() if inode not in before
        }

    def shut_down(self) -> None:
        """Shut them down. From any thread; those that are closed by now are left alone."""
        for number, inode in self._opened.items():
            if _inode(number) != inode:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
                # one that listens would end Gloo's thread, and the process
                if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    own.shutdown(socket.SHUT_RD)
        self._opened = {}


def _sockets() -> dict[int, str]:
    """Return file descriptor -> inode, "socket:[17]", of this process's sockets."""
    try:
        numbers = [int(name) for name in os.listdir(_OWN)]
    except OSError:
        return {}
    inodes = {number: _inode(number) for number in numbers}
    return {number: inode for number, inode in inodes.items() if inode.startswith("socket:")}


def _inode(number: int) -> str:
    try:
        return os.readlink(f"{_OWN}/{number}")
    except OSError:
        return ""
