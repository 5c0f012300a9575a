"""The rendezvous server of an elastic job: a key-value store for Gloo's ranks, and the workers'
requests.

    GET, PUT, DELETE /scope/key         values are bytes; 410 for a value that will never be stored
    POST /elastic/join, /elastic/beat   JSON; passed to the driver's loop, which answers now or later
    POST /elastic/copies                JSON; where copies of ranks' state are held (copies/started.py)
    POST /elastic/store                 JSON; the store of torch's groups (store.py), answered here (torch_store.py)

Unsigned and repeated requests (signing.py) get 403 and no information. The server listens at one
address, that of the job's interface.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from trainkit.extensions.elastic.connections import Connections
from trainkit.extensions.elastic.signing import HEADER, NONCE, Nonces, answer_to, is_signed, sign
from trainkit.extensions.elastic.torch_store import STORE, Asked, TorchStore
from trainkit.safety.threads import printed, start_thread

LARGEST = 2**20  # maximum bytes of a body; Gloo writes an address for each rank
POLL_S = 10.0  # maximum time for an answer
_IDLE_S = 60.0  # a connection idle for this long is closed
_MOST_FIELDS, _LONGEST_LINE = 100, 65536  # of a request's head


class Request:
    """A worker's request, to be answered by the driver's loop."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._answered = threading.Event()
        self._answer: dict[str, Any] | None = None

    def answer(self, content: dict[str, Any]) -> None:
        """Set the answer."""
        self._answer = content
        self._answered.set()

    def wait(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer, or None if there is none in time."""
        self._answered.wait(timeout_s)
        return self._answer


class Server:
    """Serves in its own threads until it is closed.

    Args:
        address: address to listen at; the system chooses the port.
        secret: the job's secret, see signing.py.
        on_join, on_beat: called with a request in its own thread; they pass it on and return at
            once.
        on_unseated: called in a request's thread when a value of no generation is stored: by
            hvd.init() without a seat.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        on_join: Callable[[Request], None],
        on_beat: Callable[[Request], None],
        on_unseated: Callable[[], None] = lambda: None,
    ) -> None:
        self._store: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()
        self._given_up = 0
        self.torch_store = TorchStore(POLL_S)
        self._on_unseated = on_unseated
        handler = type("Handler", (_Handler,), {"owner": self})
        self.secret = secret
        self.posts = {"/elastic/join": on_join, "/elastic/beat": on_beat}
        self._http = Connections((address, 0), handler)
        self.nonces = Nonces()
        self.port: int = self._http.server_address[1]
        serve = functools.partial(self._http.serve_forever, 0.1)
        start_thread("rendezvous", serve, printed("The driver listens again.", retry_s=0.1))

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._http.shutdown()
        self._http.server_close()

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value from the store."""
        with self._lock:
            return self._store.get(scope, {}).get(key)

    def give_up(self, generation: int) -> None:
        """Tell ranks still searching for each other in this generation
        at once that it will never be complete.
        """
        self._given_up = max(self._given_up, generation)
        self.torch_store.give_up(generation)

    def is_given_up(self, scope: str) -> bool:
        """Return whether a scope belongs to a generation that was given up."""
        generation = generation_of(scope)
        return generation is not None and generation <= self._given_up

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value."""
        with self._lock:
            self._store.setdefault(scope, {})[key] = value
        if generation_of(scope) is None:
            self._on_unseated()

    def delete(self, scope: str, key: str) -> None:
        """Delete a value, unless it belongs to a generation.

        Each Gloo rank deletes its own value once it has found all others, which may not have found
        it yet: such values stay until `forget`.
        """
        with self._lock:
            if generation_of(scope) is None:
                self._store.get(scope, {}).pop(key, None)

    def forget(self, before: int) -> None:
        """Delete the values of all generations before this one."""
        with self._lock:
            for scope in list(self._store):
                generation = generation_of(scope)
                if generation is not None and generation < before:
                    del self._store[scope]
        self.torch_store.forget(before)


def generation_of(scope: str) -> int | None:
    """Return 3 for "g3.global", None for a scope without a generation."""
    head, dot, _ = scope.partition(".")
    return int(head[1:]) if dot and head[:1] == "g" and head[1:].isdecimal() else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    owner: Server
    server: Connections
    # of the present request, if it is signed; then its answer is signed too
    _nonce: str | None = None
    raw_requestline: bytes
    _fields: dict[str, str]  # of the present request, by their names in lower case

    def parse_request(self) -> bool:
        """Read the head of a request; return whether it is one, else answer.

        The parent's is a parser of e-mail, and cost half of a job's driver.
        """
        self.command, self.requestline, self.close_connection = "", "", True
        first = self.raw_requestline.decode("latin-1").split()
        self._fields = {}
        for _ in range(_MOST_FIELDS):
            line = self.rfile.readline(_LONGEST_LINE)
            if not line.strip():
                break
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not line.endswith(b"\n"):
                first = []
                break
            self._fields[name.strip().lower()] = value.strip()
        else:
            first = []
        if len(first) != 3 or first[2] not in ("HTTP/1.0", "HTTP/1.1"):
            self._nonce = None
            self._send(HTTPStatus.BAD_REQUEST)
            return False
        self.command, self.path, self.request_version = first
        keeps = first[2] == "HTTP/1.1" and self._fields.get("connection", "").lower() != "close"
        self.close_connection = not keeps
        return True

    def do_GET(self) -> None:
        """Answer with a value, or 404; with 410 if it will never come."""
        if self._read() is None or (place := self._place()) is None:
            return
        value = self.owner.get(*place)
        if value is None:
            self._send(
                HTTPStatus.GONE if self.owner.is_given_up(place[0]) else HTTPStatus.NOT_FOUND
            )
        else:
            self._send(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        """Store a value."""
        if (body := self._read()) is None or (place := self._place()) is None:
            return
        self.owner.put(*place, body)
        self._send(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        """Delete a value."""
        if self._read() is None or (place := self._place()) is None:
            return
        self.owner.delete(*place)
        self._send(HTTPStatus.OK)

    def do_POST(self) -> None:
        """Pass a worker's request to the driver, and wait for the answer."""
        if (body := self._read()) is None:
            return
        if self.path != STORE and self.path not in self.owner.posts:
            self._send(HTTPStatus.NOT_FOUND, b"no such request")
            return
        try:
            content = json.loads(body)
            request = Asked.of(content) if self.path == STORE else _checked(self.path, content)
        except (ValueError, TypeError, KeyError) as error:
            self._send(
                HTTPStatus.BAD_REQUEST,
                f"not a request that this driver understands: {error!r}".encode(),
            )
            return
        self._send(HTTPStatus.OK, json.dumps(self._answer_to(request)).encode())

    def _answer_to(self, request: Asked | dict[str, Any]) -> dict[str, Any]:
        if isinstance(request, Asked):
            return self.owner.torch_store.answer(request)
        passed_on = Request(request)
        self.owner.posts[self.path](passed_on)
        return passed_on.wait(POLL_S) or {"answer": "wait"}

    def _read(self) -> bytes | None:
        """Return the body of a signed request; otherwise answer with an error and return None."""
        self._nonce = None
        length = self._fields.get("content-length", "0")
        if re.fullmatch("[0-9]{1,15}", length) is None or int(length) > LARGEST:
            self.close_connection = True  # the body is not read
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        body = self.rfile.read(int(length))
        nonce, given = self._fields.get(NONCE.lower()), self._fields.get(HEADER.lower())
        secret = self.owner.secret
        is_ours = is_signed(secret, self.command, self.path, nonce, body, given)
        if nonce is not None and is_ours and self.owner.nonces.take(nonce):
            self._nonce = nonce
            self.server.know(self.connection)
            return body
        self.close_connection = True
        self._send(HTTPStatus.FORBIDDEN)
        return None

    def _place(self) -> tuple[str, str] | None:
        self.close_connection = True  # Gloo's client opens one per request
        parts = self.path.split("/")
        if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
            self._send(HTTPStatus.BAD_REQUEST, b"the path must be /scope/key")
            return None
        return parts[1], parts[2]

    def _send(self, status: HTTPStatus, body: bytes = b"") -> None:
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n" if self.close_connection else ""
        if self._nonce is not None:
            head += (
                f"{HEADER}:"
                f" {sign(self.owner.secret, answer_to(status), self.path, self._nonce, body)}\r\n"
            )
        # one write: a second would wait for the first one's ACK
        self.wfile.write(head.encode() + b"\r\n" + body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Log nothing: Gloo polls a hundred times a second."""


def _checked(path: str, content: Any) -> dict[str, Any]:
    """Return a request's content with each value converted to its type.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or of the wrong type.
    """
    checked = {"worker": str(content["worker"]), "generation": int(content["generation"])}
    if path == "/elastic/join":
        return checked | {
            "commit": int(content["commit"]),
            "replica_size": int(content["replica_size"]),
            "is_whole": bool(content["is_whole"]),
            "copies": int(content["copies"]),
        }
    if path == "/elastic/copies":
        address = content["address"]
        return checked | {"address": address and [str(address[0]), int(address[1])]}
    stall_s = content["stall_s"]
    return checked | {
        "step": int(content["step"]),
        "progress": int(content["progress"]),
        "waiting": str(content["waiting"]),
        "stall_s": None if stall_s is None else float(stall_s),
        "raised": bool(content["raised"]),
    }
