"""What the servers of an elastic job share, the driver's and the copy servers': signed requests over
HTTP, a thread for each connection.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from trainkit.extensions.elastic.connections import Connections
from trainkit.extensions.elastic.signing import HEADER, NONCE, Nonces, is_signed
from trainkit.safety.threads import printed, start_thread

_MOST_FIELDS, _LONGEST_LINE = 100, 65536  # of a request's head


class Owner(Protocol):
    """A server."""

    secret: str
    nonces: Nonces


class SignedHandler(BaseHTTPRequestHandler):
    """The requests of one connection.

    Attributes:
        fields: of the present request's head, by their names in lower case.
        nonce: of the present request, if it is signed; then its answer is signed too.
        pauses: whether the last request comes again after a pause, and its connection needs no
            thread until then (pauses.py).
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: Any  # an Owner
    server: Connections
    raw_requestline: bytes
    fields: dict[str, str]
    nonce: str | None = None
    close_connection = False
    pauses = False

    def handle(self) -> None:
        """Answer requests until the connection closes or pauses."""
        while not (self.close_connection or self.pauses):
            self.handle_one_request()

    def finish(self) -> None:
        """Close what was opened for the connection, unless it pauses."""
        if not self.pauses:
            super().finish()

    def proceed(self) -> SignedHandler:
        """Answer the next requests of a connection that paused."""
        self.pauses = False
        self.handle()
        self.finish()
        return self

    def parse_request(self) -> bool:
        """Read the head of a request; return whether it is one, else answer.

        The parent's is a parser of e-mail, and cost half of a job's driver.
        """
        self.command = self.requestline = ""
        self.close_connection = True
        self.nonce = None
        first = self.raw_requestline.decode("latin-1").split()
        if len(first) != 3 or first[2] not in ("HTTP/1.0", "HTTP/1.1") or not self._has_fields():
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            return False
        self.command, self.path, self.request_version = first
        if first[2] == "HTTP/1.1":
            self.close_connection = self.fields.get("connection", "").lower() == "close"
        return True

    def _has_fields(self) -> bool:
        """Read the fields of a head; return whether they are some."""
        self.fields = {}
        for _ in range(_MOST_FIELDS):
            line = self.rfile.readline(_LONGEST_LINE)
            if not line.strip():
                return True
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not line.endswith(b"\n"):
                return False
            self.fields[name.strip().lower()] = value.strip()
        return False

    def is_ours(self, body: bytes = b"") -> bool:
        """Return whether the present request is signed, and the first of its nonce."""
        nonce = self.fields.get(NONCE.lower())
        given = self.fields.get(HEADER.lower())
        signed = is_signed(self.owner.secret, self.command, self.path, nonce, body, given)
        if nonce is None or not signed or not self.owner.nonces.take(nonce):
            return False
        self.nonce = nonce
        self.server.know(self.connection)
        return True

    def head(self, status: HTTPStatus, length: int) -> str:
        """Return the begin of an answer, without the line that ends its head."""
        closes = "Connection: close\r\n" if self.close_connection else ""
        first = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        return f"{first}Content-Length: {length}\r\n{closes}"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Log nothing: Gloo polls a hundred times a second."""


def listen(address: str, owner: Owner, handler: type[SignedHandler], name: str) -> Connections:
    """Serve in threads of its own, at a port that the system chooses.

    Args:
        name: of the thread that listens.
    """
    connections = Connections((address, 0), type("Handler", (handler,), {"owner": owner}))
    serve = functools.partial(connections.serve_forever, 0.1)
    start_thread(name, serve, printed(f"The server for {name} listens again.", retry_s=0.1))
    return connections


def hang_up(connections: Connections) -> None:
    """Stop listening, and close all connections."""
    connections.shutdown()
    connections.server_close()
