"""The two ends of a connection to a job's rendezvous server:
the server's sockets, and a worker's signed requests.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from typing import Any

from trainkit.extensions.elastic.pauses import Pauses
from trainkit.extensions.elastic.signing import HEADER, NONCE, Client, answer_to, is_signed
from trainkit.safety.threads import printed, start_thread

MOST_STRANGERS = 1024  # connections without a signed request so far


class NotSigned(http.client.HTTPException):
    """An answer that lacks the job's signature: another program listens at the driver's address."""


class SignedConnection:
    """A worker's connection to the driver; one request at a time.
    It is opened again after `close`.
    """

    def __init__(self, address: tuple[str, int], secret: str, timeout_s: float) -> None:
        self._http = http.client.HTTPConnection(*address, timeout=timeout_s)
        self._secret = secret
        self._client = Client(secret)

    def post(self, target: str, content: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request as JSON; return the answer's status and body.

        Raises:
            OSError, http.client.HTTPException: there is no answer, or none that is signed. A
                refusal (400 and above) need not be.
        """
        body = json.dumps(content).encode()
        headers = self._client.headers("POST", target, body)
        self._http.request("POST", target, body, {"Content-Type": "application/json"} | headers)
        response = self._http.getresponse()
        text = response.read()
        given = response.headers.get(HEADER)
        if response.status < http.client.BAD_REQUEST and not is_signed(
            self._secret, answer_to(response.status), target, headers[NONCE], text, given
        ):
            raise NotSigned("its answer lacks this job's signature")
        return response.status, text

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


class Connections(socketserver.ThreadingTCPServer):
    """The server's connections, a thread for each that does not pause (pauses.py).
    If strangers hold too many, the oldest of theirs is closed.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256  # all workers connect at once

    def __init__(self, *args: Any) -> None:
        self._known: set[socket.socket] = set()  # those that have brought a signed request
        self._strangers: dict[socket.socket, None] = {}  # the others, the oldest first
        self._lock = threading.Lock()
        self._pauses = Pauses(self._answer, self._resume)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Record a connection, and serve it."""
        with self._lock:
            self._strangers[request] = None
            is_full = len(self._strangers) > MOST_STRANGERS
            oldest = next(iter(self._strangers)) if is_full else None
            if oldest is not None:
                del self._strangers[oldest]
        if oldest is not None:
            _shut(oldest)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection's requests in this thread."""
        handler_class: Any = self.RequestHandlerClass
        new = functools.partial(handler_class, request, client_address, self)
        self._serve(request, client_address, new)

    def _serve(self, request: Any, client_address: Any, answer: Callable[[], Any]) -> None:
        """Answer requests until their connection closes or pauses.

        Args:
            answer: does it, and returns the connection's handler.
        """
        try:
            handler = answer()
        except Exception:
            self.handle_error(request, client_address)
            self.shutdown_request(request)
            return
        if handler.pauses:
            self._pauses.add(handler)
        else:
            self.shutdown_request(request)

    def _resume(self, handler: Any) -> None:
        """Answer the requests of a connection that paused in a thread of its own."""
        work = functools.partial(
            self._serve, handler.request, handler.client_address, handler.proceed
        )
        start_thread("connection", work, printed("The connection is closed."))

    def _answer(self, handler: Any) -> bool:
        """Answer one request in the present thread; return whether its connection pauses again."""
        handler.pauses = False
        try:
            handler.handle_one_request()
        except Exception:
            handler.close_connection = True
            self.handle_error(handler.request, handler.client_address)
        return bool(handler.pauses)

    def know(self, request: Any) -> None:
        """Note that a connection has brought a signed request."""
        if request in self._known:
            return
        with self._lock:
            self._strangers.pop(request, None)
            self._known.add(request)

    def shutdown_request(self, request: Any) -> None:
        """Forget a closed connection."""
        with self._lock:
            self._strangers.pop(request, None)
            self._known.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, and close all connections."""
        super().server_close()
        with self._lock:
            left = [*self._known, *self._strangers]
        self._pauses.close()
        for one in left:
            _shut(one)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an exception; but a worker that was killed during a
        request is reported by the driver elsewhere.
        """
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
