"""Signatures of requests: only those computed like Horovod's C++ side are accepted."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from trainkit.launch.elastic.signing import is_signed, new_secret, sign

SECRET = "0123456789abcdef" * 4


def test_a_signature_is_what_the_other_side_computes() -> None:
    """HMAC-SHA256 over method, target and body, with the secret's letters as the key."""
    expected = hmac.new(SECRET.encode(), b"PUT\n/g1.global/0\n\x00\xff", hashlib.sha256).hexdigest()
    assert sign(SECRET, "PUT", "/g1.global/0", b"\x00\xff") == expected


def test_a_signature_is_known_by_its_digits() -> None:
    """A fixed example for the other side's implementation; openssl dgst -hmac gives the same."""
    assert sign(SECRET, "GET", "/scope/key") == "de42bf930261efbe327e722fd555a8eb38391efe66662b20dee5ed53ab587c1f"


def test_a_signed_request_is_accepted() -> None:
    """The correct one."""
    assert is_signed(SECRET, "POST", "/a/b", b"body", sign(SECRET, "POST", "/a/b", b"body"))


@pytest.mark.parametrize(
    ("method", "target", "body", "secret"),
    [
        ("PUT", "/a/b", b"body", SECRET),
        ("POST", "/a/c", b"body", SECRET),
        ("POST", "/a/b", b"other", SECRET),
        ("POST", "/a/b", b"body", "f" * 64),
    ],
)
def test_a_signature_under_something_else_is_refused(method: str, target: str, body: bytes, secret: str) -> None:
    """Method, target, body and secret all count."""
    assert not is_signed(SECRET, "POST", "/a/b", b"body", sign(secret, method, target, body))


@pytest.mark.parametrize("signature", [None, "", "x", "\udcff", "é"])
def test_no_signature_is_none(signature: str | None) -> None:
    """Neither a missing header nor one that is no digest."""
    assert not is_signed(SECRET, "GET", "/a/b", b"", signature)


def test_each_job_has_a_secret_of_its_own() -> None:
    """64 hexadecimal digits."""
    assert new_secret() != new_secret() and len(bytes.fromhex(new_secret())) == 32
