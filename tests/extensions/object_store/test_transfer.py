"""Temporary folders of checkpoints on their way to a URL:
none is left for long, and none of a living process is removed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.checkpoints import fill
from trainkit.checkpoint.places import make_store
from trainkit.extensions.object_store import transfer

URL = f"memory://{uuid.uuid4().hex}/run"


def upload(started: Connection) -> None:
    """Write a checkpoint to a store that never answers."""

    def put_file(self: MemoryFileSystem, path: str, to: str, **options: Any) -> None:
        started.send(path)
        time.sleep(600)

    MemoryFileSystem.put_file = put_file  # type: ignore[method-assign] # of this process, which is killed
    fill(make_store(URL), "a")


def test_an_upload_that_was_killed_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start on the host removes its folder;
    while the upload runs, another start leaves it alone.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, theirs = multiprocessing.Pipe()
    uploading = multiprocessing.get_context("fork").Process(target=upload, args=(theirs,))
    uploading.start()
    file = Path(ours.recv())
    make_store(URL)
    assert file.exists() and file.is_relative_to(tmp_path)
    uploading.kill()
    uploading.join()
    assert file.exists()
    make_store(URL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start may come between the making of a folder and its lock:
    the upload gets another folder.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = transfer._locked
    starts = [transfer.remove_left_folders]

    def locked(folder: Path, kind: int) -> Any:
        if starts:
            starts.pop()()
        return lock(folder, kind)

    monkeypatch.setattr(transfer, "_locked", locked)
    with transfer.transfer_folder() as folder:
        assert folder.is_dir() and list(tmp_path.iterdir()) == [folder]
    assert not starts and list(tmp_path.iterdir()) == []
