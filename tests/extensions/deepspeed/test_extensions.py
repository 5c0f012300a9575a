"""The compiled parts of DeepSpeed: their folder, and no lock that stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainkit.errors import EngineError
from trainkit.extensions.deepspeed.extensions import (
    as_local_rank,
    building,
    choose_folder,
    clear_locks,
    is_built,
)


def test_the_folder_is_the_users_or_one_for_the_versions(tmp_path: Path) -> None:
    """A folder that is set stays; else it is in the cache, by version,
    and set for what is started.
    """
    assert choose_folder({"TORCH_EXTENSIONS_DIR": "mine"}) == Path("mine")
    environ = {"TRAINKIT_CACHE": str(tmp_path)}
    folder = choose_folder(environ)
    assert folder.parent == tmp_path / "extensions"
    assert f"torch-{torch.__version__}" in folder.name
    assert environ["TORCH_EXTENSIONS_DIR"] == str(folder)


def test_a_killed_compile_is_cleared_away(tmp_path: Path) -> None:
    """Its lock is gone before the next compile begins, and after it, also if that fails."""
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with pytest.raises(ValueError, match="compiler"), building(tmp_path, "async_io"):
        assert not lock.exists()
        lock.touch()
        raise ValueError("of the compiler")
    assert not lock.exists()
    assert not is_built(tmp_path, "async_io")
    (lock.parent / "async_io.so").touch()
    assert is_built(tmp_path, "async_io")


def test_a_compile_under_way_is_left_alone(tmp_path: Path) -> None:
    """The lock of a folder that a process works in stays, and a second compile is refused."""
    folder = tmp_path / "async_io"
    folder.mkdir()
    (folder / "lock").touch()
    compiler = subprocess.Popen(
        [sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE
    )
    try:
        clear_locks(tmp_path)
        assert (folder / "lock").exists()
        with (
            pytest.raises(EngineError, match="async_io is being compiled by another process"),
            building(tmp_path, "async_io"),
        ):
            pass
    finally:
        compiler.communicate(b"\n")
    clear_locks(tmp_path)
    assert not (folder / "lock").exists()


def test_deepspeed_is_shown_the_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the GPU of LOCAL_RANK, which is 0 where a rank sees its own alone; the variable is
    the launcher's again afterwards.
    """
    monkeypatch.setenv("LOCAL_RANK", "3")
    with as_local_rank("cuda", 0):
        assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["LOCAL_RANK"] == "3"
    with as_local_rank("cpu", None):
        assert os.environ["LOCAL_RANK"] == "3"
