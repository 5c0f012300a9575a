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

import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from trainkit.extensions.elastic.handler import SignedHandler, hang_up, listen
from trainkit.extensions.elastic.signing import HEADER, Nonces, answer_to, sign
from trainkit.extensions.elastic.torch_store import STORE, Asked, TorchStore

BEAT = "/elastic/beat"
LARGEST = 2**20  # maximum bytes of a body; Gloo writes an address for each rank
POLL_S = 10.0  # maximum time for an answer


class WorkerRequest:
    """A worker's request, to be answered once, by the driver's loop or at once."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        # held until there is an answer; an Event costs seven times as much, and each heartbeat has one
        self._unanswered = threading.Lock()
        self._unanswered.acquire()
        self._answer: dict[str, Any] | None = None

    def answer(self, content: dict[str, Any]) -> None:
        """Set the answer."""
        self._answer = content
        self._unanswered.release()

    def wait(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer, or None if there is none in time."""
        self._unanswered.acquire(timeout=timeout_s)
        return self._answer


class Server:
    """Serves in its own threads until it is closed.

    Args:
        address: address to listen at; the system chooses the port.
        secret: the job's secret, see signing.py.
        on_join, on_beat: called with a request in its own thread; they pass it on and return at
            once.
        on_unassigned: called in a request's thread when a value of no generation is stored: by
            hvd.init() without a rank.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        on_join: Callable[[WorkerRequest], None],
        on_beat: Callable[[WorkerRequest], None],
        on_unassigned: Callable[[], None] = lambda: None,
    ) -> None:
        self._store: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()
        self._given_up = 0
        self.torch_store = TorchStore(POLL_S)
        self._on_unassigned = on_unassigned
        self.secret = secret
        self.posts = {"/elastic/join": on_join, BEAT: on_beat}
        self.nonces = Nonces()
        self._http = listen(address, self, _Handler, "rendezvous")
        self.port: int = self._http.server_address[1]

    def close(self) -> None:
        """Stop listening, and close all connections."""
        hang_up(self._http)

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
            self._on_unassigned()

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


class _Handler(SignedHandler):
    timeout = 60.0  # a connection idle for this long is closed
    owner: Server

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
            content = json.loads(body.decode())
            request = Asked.of(content) if self.path == STORE else _checked(self.path, content)
        except (ValueError, TypeError, KeyError) as error:
            self._send(
                HTTPStatus.BAD_REQUEST,
                f"not a request that this driver understands: {error!r}".encode(),
            )
            return
        self._send(HTTPStatus.OK, json.dumps(self._answer_to(request)).encode())
        self.pauses = self.path == BEAT and not self.close_connection

    def _answer_to(self, request: Asked | dict[str, Any]) -> dict[str, Any]:
        if isinstance(request, Asked):
            return self.owner.torch_store.answer(request)
        passed_on = WorkerRequest(request)
        self.owner.posts[self.path](passed_on)
        return passed_on.wait(POLL_S) or {"answer": "wait"}

    def _read(self) -> bytes | None:
        """Return the body of a signed request; otherwise answer with an error and return None."""
        length = self.fields.get("content-length", "0")
        if re.fullmatch("[0-9]{1,15}", length) is None or int(length) > LARGEST:
            self.close_connection = True  # the body is not read
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        body = self.rfile.read(int(length))
        if self.is_ours(body):
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
        head = self.head(status, len(body))
        if self.nonce is not None:
            own = sign(self.owner.secret, answer_to(status), self.path, self.nonce, body)
            head += f"{HEADER}: {own}\r\n"
        # one write: a second would wait for the first one's ACK
        self.wfile.write(head.encode() + b"\r\n" + body)


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
