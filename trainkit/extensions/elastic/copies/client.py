"""A connection to the copy server of a host (server.py), and what both sides sign.

    PUT /copies/SET/FILE?sha256=HEX         stores a file
    GET /copies/SET/FILE?from=N&to=N        a part of a file
    GET /copies                             JSON: the sizes of all files, by set

SET is a checkpoint's name. A request is signed as all of a job are (signing.py), but without its
body: the target has the body's hash. So a server refuses the large body of a stranger unread: a rank sends
it once the server has asked for it (HTTP's "Expect: 100-continue"). An answer has the hash of
its own body in a header, which is signed with the target.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.extensions.elastic.connections import NotSigned
from trainkit.extensions.elastic.signing import HEADER, NONCE, Client, answer_to, is_signed

HASH = "X-Trainkit-SHA256"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ROOT = "/copies"
_CONNECT_S = 5.0
_TIMEOUT_S = 30.0  # without a byte

Address = tuple[str, int]


def signed_target(target: str, sha256: str) -> str:
    """Return what is signed of an answer: the request's target, and the hash of the answer's body."""
    return f"{target} {sha256}"


class CopyConnection:
    """A rank's connection to a copy server; one request at a time. A context manager.

    Raises:
        OSError: the server does not answer, refuses, or is not of this job; from every request.
    """

    def __init__(self, address: Address, secret: str) -> None:
        self._http = http.client.HTTPConnection(*address, timeout=_CONNECT_S)
        self._secret = secret
        self._client = Client(secret)
        self._shown = f"{address[0]}:{address[1]}"

    def __enter__(self) -> CopyConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def put(self, name: str, file: str, data: Sequence[memoryview], sha256: str) -> None:
        """Store a file of a set; its bytes come piece by piece."""
        self._ask("PUT", f"{ROOT}/{name}/{file}?sha256={sha256}", data)

    def get(self, name: str, file: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` of a file of a set."""
        return self._ask("GET", f"{ROOT}/{name}/{file}?from={start}&to={end}")

    def sizes(self) -> Mapping[str, Mapping[str, int]]:
        """Return the sizes of all files in bytes, by set and file."""
        sizes: dict[str, dict[str, int]] = json.loads(self._ask("GET", ROOT))
        return sizes

    def _ask(self, method: str, target: str, body: Sequence[memoryview] = ()) -> bytes:
        headers = self._client.headers(method, target)
        try:
            self._send(method, target, headers, body)
            response = self._http.getresponse()
            content = response.read()
        except http.client.HTTPException as error:
            raise OSError(f"the copy server at {self._shown} does not answer: {error!r}") from error
        if response.status != http.client.OK:
            raise OSError(
                f"the copy server at {self._shown} answers {response.status}:"
                f" {content.decode(errors='replace')[:200]}"
            )
        sha256 = hashlib.sha256(content).hexdigest()
        expected = signed_target(target, sha256)
        given = response.headers.get(HEADER)
        status = answer_to(response.status)
        if not is_signed(self._secret, status, expected, headers[NONCE], b"", given):
            raise OSError(str(NotSigned(f"what {self._shown} answers lacks this job's signature")))
        return content

    def _send(
        self, method: str, target: str, headers: Mapping[str, str], body: Sequence[memoryview]
    ) -> None:
        if self._http.sock is None:
            self._http.connect()
            connected: Any = self._http.sock
            connected.settimeout(_TIMEOUT_S)
        self._http.putrequest(method, target)
        for name, value in headers.items():
            self._http.putheader(name, value)
        if body:
            self._http.putheader("Content-Length", str(sum(len(piece) for piece in body)))
            self._http.putheader("Expect", "100-continue")
        self._http.endheaders()
        if body and _is_asked(self._http.sock):
            for piece in body:
                self._http.send(piece)


def _is_asked(connection: socket.socket) -> bool:
    """Return whether the server asks for the body; its answer is left to be read otherwise."""
    head = b""
    while head != CONTINUE:
        head = connection.recv(len(CONTINUE), socket.MSG_PEEK)
        if not head or not CONTINUE.startswith(head):
            return False
    connection.recv(len(CONTINUE))
    return True
