"""Signatures of HTTP requests to a job's rendezvous server: HMAC-SHA256, as made by Horovod's side (C++ and runner).

    X-Horovod-Signature: hex(hmac_sha256(key=secret as ASCII, METHOD + "\\n" + TARGET + "\\n" + BODY))

TARGET is the path of the request line ("/scope/key"), BODY the raw bytes, empty for GET and DELETE. The secret is a text of 64
hex digits drawn by a job's launcher; it reaches processes through their environment, never through a command line.
"""

from __future__ import annotations

import hmac
import secrets

HEADER = "X-Horovod-Signature"
SECRET = "HOROVOD_RENDEZVOUS_SECRET"


def new_secret() -> str:
    """Draw a secret for one job."""
    return secrets.token_hex(32)


def sign(secret: str, method: str, target: str, body: bytes = b"") -> str:
    """Return the value of the header HEADER for a request."""
    head = f"{method}\n{target}\n".encode()
    return hmac.new(secret.encode("ascii"), head + body, "sha256").hexdigest()


def is_signed(secret: str, method: str, target: str, body: bytes, signature: str | None) -> bool:
    """Return whether `signature`, the header's value or None without one, is correct."""
    if signature is None:
        return False
    return hmac.compare_digest(sign(secret, method, target, body).encode(), signature.encode(errors="replace"))
