"""Signatures of what goes to and from a job's rendezvous server: HMAC-SHA256, as made by Horovod's
side (C++ and runner).

    X-Horovod-Nonce: CLIENT.COUNT     hex digits that a client has drawn, and a number that grows with each of its requests
    X-Horovod-Signature: hex(hmac_sha256(key=secret as ASCII, METHOD + "\\n" + TARGET + "\\n" +
    NONCE + "\\n" + BODY))

TARGET is the path of the request line ("/scope/key"), BODY the raw bytes, empty for GET and DELETE.
An answer to a signed request is signed likewise, with "ANSWER <status>" for the method and the
request's nonce, so neither can be replayed. The secret is a text of 64 hex digits drawn by a job's
launcher; it reaches processes through their environment, never through a command line.
"""

from __future__ import annotations

import hmac
import itertools
import re
import secrets
import threading

from trainkit.launch.network import SECRET as SECRET

HEADER = "X-Horovod-Signature"
NONCE = "X-Horovod-Nonce"
_NONCE = re.compile(r"([0-9a-f]{16,64})\.([0-9]{1,18})")


def new_secret() -> str:
    """Draw a secret for one job."""
    return secrets.token_hex(32)


def answer_to(status: int) -> str:
    """Return what stands for the method in the signature of an answer with this HTTP status."""
    return f"ANSWER {int(status)}"


def sign(secret: str, method: str, target: str, nonce: str, body: bytes = b"") -> str:
    """Return the value of the header HEADER for a request or an answer."""
    head = f"{method}\n{target}\n{nonce}\n".encode()
    return hmac.digest(secret.encode("ascii"), head + body, "sha256").hex()


def is_signed(
    secret: str, method: str, target: str, nonce: str | None, body: bytes, signature: str | None
) -> bool:
    """Return whether `signature` is correct and `nonce` has its form:
    the headers' values, or None without one.
    """
    if signature is None or nonce is None or _NONCE.fullmatch(nonce) is None:
        return False
    return hmac.compare_digest(
        sign(secret, method, target, nonce, body).encode(), signature.encode(errors="replace")
    )


class Client:
    """Signs the requests of one connection, which come one after the other."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._name = secrets.token_hex(16)
        self._counts = itertools.count(1)

    def headers(self, method: str, target: str, body: bytes = b"") -> dict[str, str]:
        """Return the headers of the next request."""
        nonce = f"{self._name}.{next(self._counts)}"
        return {NONCE: nonce, HEADER: sign(self._secret, method, target, nonce, body)}


class Nonces:
    """The newest nonce of each client;
    only those of signed requests get here, so strangers cannot fill it.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, nonce: str) -> bool:
        """Return whether a nonce is newer than all of its client's before, and remember it."""
        match = _NONCE.fullmatch(nonce)
        assert match is not None
        client = match[1]
        count = int(match[2])
        with self._lock:
            if count <= self._counts.get(client, -1):
                return False
            self._counts[client] = count
            return True
