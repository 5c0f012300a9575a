"""Signatures of requests: only those computed like Horovod's C++ side are accepted."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from trainkit.extensions.elastic.signing import NONCE as HEADER_OF_NONCE
from trainkit.extensions.elastic.signing import Client, Nonces, is_signed, new_secret, sign

SECRET = "0123456789abcdef" * 4
NONCE = f"{'ab' * 16}.7"


def test_a_signature_is_what_the_other_side_computes() -> None:
    """HMAC-SHA256 over method, target, nonce and body, with the secret's letters as the key."""
    expected = hmac.new(
        SECRET.encode(), b"PUT\n/g1.global/0\n" + NONCE.encode() + b"\n\x00\xff", hashlib.sha256
    ).hexdigest()
    assert sign(SECRET, "PUT", "/g1.global/0", NONCE, b"\x00\xff") == expected


def test_a_signature_is_known_by_its_digits() -> None:
    """A fixed example for the other side's implementation; openssl dgst -hmac gives the same."""
    assert (
        sign(SECRET, "GET", "/scope/key", NONCE)
        == "03cecef26bb0b3d5fceb4b95399508881a3349c85cc7f30d9d2ca9daeec4d9b7"
    )


def test_a_signed_request_is_accepted() -> None:
    """The correct one."""
    assert is_signed(
        SECRET, "POST", "/a/b", NONCE, b"body", sign(SECRET, "POST", "/a/b", NONCE, b"body")
    )


@pytest.mark.parametrize(
    ("method", "target", "nonce", "body", "secret"),
    [
        ("PUT", "/a/b", NONCE, b"body", SECRET),
        ("POST", "/a/c", NONCE, b"body", SECRET),
        ("POST", "/a/b", NONCE + "1", b"body", SECRET),
        ("POST", "/a/b", NONCE, b"other", SECRET),
        ("POST", "/a/b", NONCE, b"body", "f" * 64),
    ],
)
def test_a_signature_under_something_else_is_refused(
    method: str, target: str, nonce: str, body: bytes, secret: str
) -> None:
    """Method, target, nonce, body and secret all count."""
    assert not is_signed(
        SECRET, "POST", "/a/b", NONCE, b"body", sign(secret, method, target, nonce, body)
    )


@pytest.mark.parametrize(
    "nonce",
    [None, "", "ab.1", "ab" * 16, "ab" * 16 + ".", "AB" * 16 + ".1", "ab" * 16 + "." + "9" * 5000],
)
def test_a_nonce_has_a_form(nonce: str | None) -> None:
    """Hex digits of a client, and a number of at most 18 digits:
    whatever else is signed is refused.
    """
    assert not is_signed(
        SECRET, "GET", "/a/b", nonce, b"", sign(SECRET, "GET", "/a/b", nonce or "")
    )


def test_a_nonce_counts_once() -> None:
    """Each is newer than all before of the same client; clients count apart."""
    nonces, clients = Nonces(), [Client(SECRET), Client(SECRET)]
    first, second = (
        [client.headers("GET", "/a/b")[HEADER_OF_NONCE] for _ in range(3)] for client in clients
    )
    assert [
        nonces.take(nonce)
        for nonce in (first[0], second[1], first[1], second[0], first[1], first[2])
    ] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("signature", [None, "", "x", "\udcff", "é"])
def test_no_signature_is_none(signature: str | None) -> None:
    """Neither a missing header nor one that is no digest."""
    assert not is_signed(SECRET, "GET", "/a/b", NONCE, b"", signature)


def test_each_job_has_a_secret_of_its_own() -> None:
    """64 hexadecimal digits."""
    assert new_secret() != new_secret() and len(bytes.fromhex(new_secret())) == 32
