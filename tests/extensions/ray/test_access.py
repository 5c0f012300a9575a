"""What a rank needs to join the Ray cluster of rank 0; no Ray is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.extensions.ray.connection import access, take_access

NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_cluster_without_tokens_needs_nothing() -> None:
    """Neither where no mode is set, nor where the user has switched tokens off."""
    assert access() == {}
    os.environ["RAY_AUTH_MODE"] = "disabled"
    assert access() == {}


def test_the_token_is_the_users_or_that_of_rays_file(tmp_path: Path) -> None:
    """By the variables that Ray reads, in its order."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the file\n")
    (tmp_path / "other").write_text("of another")
    os.environ["RAY_AUTH_MODE"] = "token"
    assert access() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of the file"}
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "other")
    assert access()["RAY_AUTH_TOKEN"] == "of another"
    os.environ["RAY_AUTH_TOKEN"] = "typed"
    assert access()["RAY_AUTH_TOKEN"] == "typed"


def test_a_rank_takes_it_unless_the_user_has_set_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads it when it is imported, or is asked to read it again."""
    take_access({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"})
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "mine")
    take_access({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"})
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
