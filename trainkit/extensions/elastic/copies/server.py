"""The copy server of a host: a process of its own that holds the state of ranks, of this host and of
others, in its memory. It outlives the ranks, and ends with the job. No torch.

A set of files is a checkpoint, its manifest the last one of it: with the manifest of a new set, all
other sets are dropped. So at most two sets are held: the last whole one, and what has come of the next.

`python -m trainkit.extensions.elastic.copies.server`, with the environment of a worker; the driver
starts it (started.py) and ends it. A server that does not reach its driver ends by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import sys
import threading
import time
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from trainkit.errors import JobEnded, TrainkitError
from trainkit.extensions.elastic.client import UNREACHABLE_S, Membership
from trainkit.extensions.elastic.copies.client import CONTINUE, HASH, ROOT, signed_target
from trainkit.extensions.elastic.handler import SignedHandler, hang_up, listen
from trainkit.extensions.elastic.network import worker_interface
from trainkit.extensions.elastic.signing import HEADER, Nonces, answer_to, sign
from trainkit.launch.network import address_of

REGISTER = "/elastic/copies"  # of the driver's server
LAST = "manifest.json"  # of a set
_EVERY_S = 1.0  # between two messages to the driver
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9=._-]{0,199}")
_BLOCK = 1 << 20


class Sets:
    """Files in memory, by set."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[str, bytearray]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, file: str, data: bytearray) -> None:
        """Store a file; drop what the module says."""
        with self._lock:
            if name not in self._sets:
                self._sets = {old: files for old, files in self._sets.items() if LAST in files}
            self._sets.setdefault(name, {})[file] = data
            if file == LAST:
                self._sets = {name: self._sets[name]}

    def get(self, name: str, file: str) -> bytearray | None:
        """Return a file; None if there is none."""
        with self._lock:
            return self._sets.get(name, {}).get(file)

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the size of each file in bytes, by set."""
        with self._lock:
            return {
                name: {file: len(data) for file, data in files.items()}
                for name, files in self._sets.items()
            }


class CopyServer:
    """Serves in its own threads until it is closed.

    Args:
        address: address to listen at; the system chooses the port.
        secret: the job's secret.
    """

    def __init__(self, address: str, secret: str) -> None:
        self.secret = secret
        self.sets = Sets()
        self.nonces = Nonces()
        self._http = listen(address, self, _Handler, "copies")
        self.address: tuple[str, int] = self._http.server_address[:2]  # type: ignore[assignment]

    def close(self) -> None:
        """Stop listening, and close all connections."""
        hang_up(self._http)


def memory_available() -> int:
    """Return the bytes that this host can still give to processes."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


class _Handler(SignedHandler):
    timeout = 120.0  # a connection idle for this long is closed
    owner: CopyServer

    def do_PUT(self) -> None:
        """Store a file."""
        if not self._may() or (place := self._place()) is None:
            return
        name, file, query = place
        length = int(self.fields["content-length"])
        if length > (free := memory_available()):
            text = f"{length} bytes are to be stored, and this host has {free} bytes of memory free"
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, text)
            return
        if self.fields.get("expect") == "100-continue":
            self.wfile.write(CONTINUE)
        data = bytearray(length)
        view = memoryview(data)
        at = 0
        while at < length:
            if not (count := self.rfile.readinto(view[at : at + _BLOCK])):
                self.close_connection = True  # the rank has ended
                return
            at += count
        if hashlib.sha256(data).hexdigest() != query.get("sha256"):
            self._refuse(HTTPStatus.BAD_REQUEST, "the body is not what was sent")
            return
        self.owner.sets.put(name, file, data)
        self._send(b"")

    def do_GET(self) -> None:
        """Answer with a part of a file, or with all sizes."""
        if not self._may():
            return
        if self.path == ROOT:
            self._send(json.dumps(self.owner.sets.sizes()).encode())
            return
        if (place := self._place()) is None:
            return
        name, file, query = place
        data = self.owner.sets.get(name, file)
        if data is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"{name}/{file} is not here")
            return
        start, end = int(query["from"]), int(query["to"])
        self._send(memoryview(data)[start:end])

    def _may(self) -> bool:
        """Return whether the request is signed, and has a length; otherwise answer."""
        if not self.is_ours():
            self._refuse(HTTPStatus.FORBIDDEN, "")
            return False
        length = self.fields.get("content-length", "")
        if self.command == "PUT" and re.fullmatch("[0-9]{1,15}", length) is None:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a file has a length")
            return False
        return True

    def _place(self) -> tuple[str, str, dict[str, str]] | None:
        split = urlsplit(self.path)
        parts = split.path.removeprefix(f"{ROOT}/").split("/")
        if len(parts) != 2 or not all(map(_NAME.fullmatch, parts)):
            self._refuse(HTTPStatus.BAD_REQUEST, f"the path must be {ROOT}/SET/FILE")
            return None
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        return parts[0], parts[1], query

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # the body is not read
        self.wfile.write(f"{self.head(status, len(text))}\r\n{text}".encode())

    def _send(self, body: bytes | memoryview) -> None:
        assert self.nonce is not None
        sha256 = hashlib.sha256(body).hexdigest()
        signed = signed_target(self.path, sha256)
        own = sign(self.owner.secret, answer_to(HTTPStatus.OK), signed, self.nonce)
        head = self.head(HTTPStatus.OK, len(body))
        self.wfile.write(f"{head}{HASH}: {sha256}\r\n{HEADER}: {own}\r\n\r\n".encode())
        self.wfile.write(body)


def main() -> None:
    """Serve until the driver ends this process, or cannot be reached any more.

    Raises:
        TrainkitError: this host has no interface to the driver.
    """
    environ = dict(os.environ)
    environ |= worker_interface(environ)
    driver = Membership.of(environ)
    server = CopyServer(address_of(environ["HOROVOD_GLOO_IFACE"]), driver.link.secret)
    message = {"worker": driver.worker, "generation": 0, "address": list(server.address)}
    heard = time.monotonic()
    with contextlib.closing(driver.link.connect()) as connection:
        while time.monotonic() - heard < UNREACHABLE_S:
            try:
                driver.link.ask(connection, REGISTER, message)
                heard = time.monotonic()
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request opens it again
            except JobEnded:
                return
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    try:
        main()
    except TrainkitError as error:
        sys.exit(str(error))
