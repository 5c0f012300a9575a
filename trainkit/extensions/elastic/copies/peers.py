"""The copy servers of a job, as a rank uses them: it sends files to some, and reads files from any."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.errors import CheckpointError
from trainkit.extensions.elastic.copies.client import Address, CopyConnection

_START_S = 30.0  # so long a copy server may take to start
_POLL_S = 0.2

Sizes = Mapping[str, Mapping[str, int]]  # of files in bytes, by set and file


class Holders(NamedTuple):
    """Who holds what a rank sends.

    Attributes:
        own: this rank's host.
        others: the other hosts whose memory holds a copy.
    """

    own: str
    others: tuple[str, ...]


class Peers:
    """See the module.

    Args:
        servers: returns the address of each host's server.
        secret: the job's.
        holders: of what this rank sends.

    Attributes:
        known: what each server held when `look` was called, by host.
        read_here: bytes that this rank has read from its own host's memory.
        read_elsewhere: bytes that it has read from the memory of other hosts.
    """

    def __init__(
        self, servers: Callable[[], Mapping[str, Address]], secret: str, holders: Holders
    ) -> None:
        self._servers, self._secret, self.holders = servers, secret, holders
        self.known: dict[str, Sizes] = {}
        self.read_here = self.read_elsewhere = 0

    def send(self, name: str, file: str, data: Sequence[memoryview]) -> dict[str, Any]:
        """Send a file of a set to this rank's holders; return its size and hash.

        Raises:
            OSError: one of them does not take it.
        """
        digest = _sha256(data)
        own, others = self.holders
        servers = self._waited_for({own, *others})
        for host in (own, *others):
            with CopyConnection(servers[host], self._secret) as server:
                server.put(name, file, data, digest)
        return {"bytes": sum(len(piece) for piece in data), "sha256": digest}

    def send_to_all(self, name: str, file: str, data: Sequence[memoryview]) -> None:
        """Send a small file of a set to all servers.

        Raises:
            OSError: none takes it.
        """
        digest = _sha256(data)
        failed = list[OSError]()
        servers = self._servers()
        for address in servers.values():
            try:
                with CopyConnection(address, self._secret) as server:
                    server.put(name, file, data, digest)
            except OSError as error:  # of a host that is being lost: one is enough
                failed.append(error)
        if len(failed) == len(servers):
            raise failed[0] if failed else OSError("no host has a copy server any more")

    def _waited_for(self, hosts: set[str]) -> Mapping[str, Address]:
        """Return all addresses, once those of these hosts are there: a server may just start."""
        end = time.monotonic() + _START_S
        while missing := hosts - (servers := self._servers()).keys():
            if time.monotonic() > end:
                raise OSError(f"no copy server runs on {', '.join(sorted(missing))}")
            time.sleep(_POLL_S)
        return servers

    def look(self) -> dict[str, Sizes]:
        """Ask all servers what they hold; return it, by host, for those that answer."""
        known: dict[str, Sizes] = {}
        for host, address in self._servers().items():
            with contextlib.suppress(OSError), CopyConnection(address, self._secret) as server:
                known[host] = server.sizes()
        self.known = known
        return known

    def files_of(self, name: str) -> dict[str, int]:
        """Return the sizes of a set's files, on any host, by what is known."""
        return {
            file: size for sets in self.known.values() for file, size in sets.get(name, {}).items()
        }

    def read(self, name: str, file: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of a file, or those from `start` to before `end`, from a server that is
        known to have it: this host's if it does.

        Raises:
            CheckpointError: none has it any more.
        """
        there = [host for host, sets in self.known.items() if file in sets.get(name, {})]
        failed: Exception | None = None
        for host in sorted(there, key=self.holders.own.__ne__):
            last = self.known[host][name][file] if end is None else end
            try:
                with CopyConnection(self._servers()[host], self._secret) as server:
                    data = server.get(name, file, start, last)
            except (OSError, KeyError) as error:
                failed = error
                continue
            self.read_here += len(data) * (host == self.holders.own)
            self.read_elsewhere += len(data) * (host != self.holders.own)
            return data
        raise CheckpointError(
            f"The copy {name}: no host holds {file} any more{f' ({failed})' if failed else ''}."
        )


def _sha256(data: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()
