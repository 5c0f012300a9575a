"""The sockets by which Gloo's ranks are connected, so that a rank can end its own waiting, and its
peers learn of its end.

Gloo waits for a rank whose host is gone until a timeout of minutes: nothing closes the connection,
and abort() of its backend changes nothing (torch 2.15). A socket that is shut down here for reading ends
each operation on it at once, with the error of a closed connection. (Shut down for writing too, Gloo's
thread would end the process.) Gloo then closes it, and so its peers have the error too. Else they wait
for as long as this rank holds a sum that was started, since that holds the connections of a group
that is destroyed.

A forked process, such as a loader worker, has copies of the sockets, and a peer learns nothing as
long as one is open: they are closed after each fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from typing import ClassVar

_OWN = "/proc/self/fd"


class Sockets:
    """Those that were opened within `opening`, and those that came in at one of them since: Gloo
    accepts connections after its start. Linux alone: elsewhere none.
    """

    _all: ClassVar[weakref.WeakSet[Sockets]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._opened: dict[int, str] = {}  # file descriptor -> inode
        self._all.add(self)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Record the sockets that this process opens within the context."""
        before = _sockets().items()
        yield
        after = _sockets().items()
        self._opened = dict((after - before) | (after & self._opened.items()))

    def shut_down(self) -> None:
        """Shut them down. From any thread; those that are closed by now are left alone."""
        for number in self._present():
            with _duplicate(number) as own:
                # one that listens would end Gloo's thread, and the process
                if own is not None and not _listens(own):
                    with contextlib.suppress(OSError):
                        own.shutdown(socket.SHUT_RD)

    def _present(self) -> list[int]:
        present = _sockets()
        recorded = [
            number for number, inode in self._opened.items() if present.get(number) == inode
        ]
        ports = {_port(number, of_listener=True) for number in recorded} - {0}
        return recorded + [
            number for number in present if number not in recorded and _port(number) in ports
        ]

    @classmethod
    def close_copies(cls) -> None:
        """Close this process's copies: it was forked. Their numbers stay taken, since Gloo's copies
        of its objects close them again when they are deleted, whatever has the number by then.
        """
        nothing = os.open(os.devnull, os.O_RDONLY)
        for sockets in cls._all:
            for number in sockets._present():
                os.dup2(nothing, number, inheritable=False)
            sockets._opened = {}
        os.close(nothing)


os.register_at_fork(after_in_child=Sockets.close_copies)


@contextlib.contextmanager
def _duplicate(number: int) -> Iterator[socket.socket | None]:
    """Yield a socket by a file descriptor of its own; None if it is closed by now."""
    try:
        own = socket.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with own:
        yield own


def _listens(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(number: int, of_listener: bool = False) -> int:
    """Return a socket's own port, which is the listener's if it came in there; 0 if it has none, or
    does not listen where it should.
    """
    with _duplicate(number) as own:
        if own is None or own.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        return 0 if of_listener and not _listens(own) else int(own.getsockname()[1])


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
