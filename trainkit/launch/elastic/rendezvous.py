"""The rendezvous server of an elastic job: a store of values, by which Gloo's ranks find one another, and workers' requests.

    GET, PUT, DELETE /scope/key         values are bytes, and stay bytes; 410 for what nobody will put there any more
    POST /elastic/join, /elastic/beat   JSON; handed to the driver's loop, which answers now or later

Whoever does not sign (signing.py) gets 403 and learns nothing. The server listens at one address, that of the job's interface.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from trainkit.launch.elastic.signing import HEADER, is_signed

LARGEST = 2**20  # bytes of a body; Gloo writes an address for each rank
POLL_S = 10.0  # so long an answer may take
_IDLE_S = 60.0  # a connection that says nothing for so long is closed


class Request:
    """A worker's request on its way through the driver's loop."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._answered = threading.Event()
        self._answer: dict[str, Any] | None = None

    def answer(self, content: dict[str, Any]) -> None:
        """Let the worker have its answer."""
        self._answer = content
        self._answered.set()

    def wait(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer, None if there is none in time."""
        self._answered.wait(timeout_s)
        return self._answer


class Server:
    """Serves from threads of its own until it is closed.

    Args:
        address: where to listen; the port is chosen by the system.
        secret: the job's, see signing.py.
        on_join, on_beat: called with a request from its own thread; they hand it on and return at once.
    """

    def __init__(
        self, address: str, secret: str, on_join: Callable[[Request], None], on_beat: Callable[[Request], None]
    ) -> None:
        self._store: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()
        self._given_up = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self.secret = secret
        self.posts = {"/elastic/join": on_join, "/elastic/beat": on_beat}
        self._http = _Http((address, 0), handler)
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up."""
        self._http.shutdown()
        self._http.server_close()

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value of the store."""
        with self._lock:
            return self._store.get(scope, {}).get(key)

    def give_up(self, generation: int) -> None:
        """Let ranks that still look for one another in this generation know at once that it will not be whole."""
        self._given_up = max(self._given_up, generation)

    def is_given_up(self, scope: str) -> bool:
        """Whether a scope belongs to a generation that was given up."""
        generation = generation_of(scope)
        return generation is not None and generation <= self._given_up

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keep a value."""
        with self._lock:
            self._store.setdefault(scope, {})[key] = value

    def delete(self, scope: str, key: str) -> None:
        """Forget a value, but for a generation's.

        Each Gloo rank deletes its own once it has found all others, which may not have found it: these wait for `forget`.
        """
        with self._lock:
            if generation_of(scope) is None:
                self._store.get(scope, {}).pop(key, None)

    def forget(self, before: int) -> None:
        """Forget the values of all generations before this one."""
        with self._lock:
            for scope in list(self._store):
                generation = generation_of(scope)
                if generation is not None and generation < before:
                    del self._store[scope]


def generation_of(scope: str) -> int | None:
    """Return 3 for "g3.global", None for a scope without a generation."""
    head, dot, _ = scope.partition(".")
    return int(head[1:]) if dot and head[:1] == "g" and head[1:].isdecimal() else None


class _Http(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256  # all workers come at once

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note a connection, and serve it."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, and hang up on all."""
        super().server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that was killed in the midst of a request is told of elsewhere."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    owner: Server

    def do_GET(self) -> None:
        """Answer with a value, or 404; with 410 where it will not come."""
        if self._read() is None or (place := self._place()) is None:
            return
        value = self.owner.get(*place)
        if value is None:
            self._send(HTTPStatus.GONE if self.owner.is_given_up(place[0]) else HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        """Keep a value."""
        if (body := self._read()) is None or (place := self._place()) is None:
            return
        self.owner.put(*place, body)
        self._send(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        """Forget a value."""
        if self._read() is None or (place := self._place()) is None:
            return
        self.owner.delete(*place)
        self._send(HTTPStatus.OK)

    def do_POST(self) -> None:
        """Hand a worker's request to the driver, and wait for the answer."""
        if (body := self._read()) is None:
            return
        hand_on = self.owner.posts.get(self.path)
        if hand_on is None:
            self._send(HTTPStatus.NOT_FOUND, b"no such request")
            return
        try:
            request = Request(_checked(self.path, json.loads(body)))
        except (ValueError, TypeError, KeyError) as error:
            self._send(HTTPStatus.BAD_REQUEST, f"not a request that this driver understands: {error!r}".encode())
            return
        hand_on(request)
        self._send(HTTPStatus.OK, json.dumps(request.wait(POLL_S) or {"answer": "wait"}).encode())

    def _read(self) -> bytes | None:
        """Return the body of a request that is signed; answer and return None otherwise."""
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > LARGEST:
            self.close_connection = True  # what follows is not read
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        body = self.rfile.read(int(length))
        if is_signed(self.owner.secret, self.command, self.path, body, self.headers.get(HEADER)):
            return body
        self.close_connection = True
        self._send(HTTPStatus.FORBIDDEN)
        return None

    def _place(self) -> tuple[str, str] | None:
        self.close_connection = True  # Gloo's client opens one for each request
        parts = self.path.split("/")
        if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
            self._send(HTTPStatus.BAD_REQUEST, b"the path is to be /scope/key")
            return None
        return parts[1], parts[2]

    def _send(self, status: HTTPStatus, body: bytes = b"") -> None:
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n" if self.close_connection else ""
        self.wfile.write(head.encode() + b"\r\n" + body)  # in one piece: two would wait for each other's acknowledgement

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Say nothing: Gloo asks a hundred times a second."""


def _checked(path: str, content: Any) -> dict[str, Any]:
    """Return a request's content, each value of its type.

    Raises:
        KeyError, TypeError, ValueError: one is missing or is none of its type.
    """
    checked = {"worker": str(content["worker"]), "generation": int(content["generation"])}
    if path == "/elastic/join":
        return checked | {"commit": int(content["commit"])}
    stall_s = content["stall_s"]
    return checked | {
        "step": int(content["step"]),
        "progress": int(content["progress"]),
        "waiting": str(content["waiting"]),
        "stall_s": None if stall_s is None else float(stall_s),
    }
