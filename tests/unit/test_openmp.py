"""OpenMP's threads wait briefly in the processes of a command."""

from __future__ import annotations

import os
import sys

import pytest

from trainkit.__main__ import main


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_a_command_lets_them_sleep_soon(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says how they wait."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["trainkit", "--version"])
    assert main() == 0
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    os.environ.pop("GOMP_SPINCOUNT", None)
