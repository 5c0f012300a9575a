"""doctor on Ray: the version, and whether the cluster that RAY_ADDRESS names can be joined."""

from __future__ import annotations

import importlib.metadata
import socket

import pytest

from trainkit.extensions.ray.doctor import look


def with_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let this version be installed, or none."""

    def answer(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("importlib.metadata.version", answer)


def test_without_ray_nothing_is_said_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RAY_ADDRESS asks for it."""
    with_version(monkeypatch, None)
    assert list(look({})) == []
    (found,) = look({"RAY_ADDRESS": "auto"})
    assert (found.status, found.remedy) == ("warning", "pip install 'trainkit[ray]'")


@pytest.mark.parametrize(
    ("version", "status"), [("2.60.0", "ok"), ("3.0.0rc1", "ok"), ("2.9.3", "warning")]
)
def test_an_older_ray_is_named(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer ones pass."""
    with_version(monkeypatch, version)
    ray, cluster = look({})
    assert (ray.value, ray.status) == (version, status)
    assert cluster.value == "none named: launcher=ray starts one on this host"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ray://head:10001", "an address of Ray Client"),
        ("http://head:8265", "the address of the dashboard"),
        ("127.0.0.1:9", "no Ray cluster answers there"),
        ("nonsense", "no Ray cluster answers there"),
    ],
)
def test_an_address_that_cannot_be_joined_is_wrong(
    address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason."""
    with_version(monkeypatch, "2.60.0")
    _, cluster = look({"RAY_ADDRESS": address})
    assert cluster.status == "wrong" and why in cluster.why


def test_a_head_that_answers_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a connection shows."""
    with_version(monkeypatch, "2.60.0")
    with socket.create_server(("127.0.0.1", 0)) as head:
        assert [
            found.status for found in look({"RAY_ADDRESS": f"127.0.0.1:{head.getsockname()[1]}"})
        ] == ["ok", "ok"]
