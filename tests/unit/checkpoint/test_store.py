"""Stores of checkpoints: a checkpoint is complete or absent,
on this machine's disk and at a URL alike.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from tests.helpers.checkpoints import fill, small_disk, snapshot, store_of, written
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import LocalStore, Store
from trainkit.errors import CheckpointError, ConfigError
from trainkit.extensions.object_store.store import RemoteStore


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind."""
    return (
        store_of(tmp_path)
        if request.param == "folder"
        else make_store(f"memory://{uuid.uuid4().hex}/checkpoints")
    )


def test_what_was_written_is_fetched(store: Store) -> None:
    """A checkpoint is stored complete under its name, and its manifest can be fetched alone."""
    fill(store, "a", "b")
    assert store.names() == ["a", "b"]
    with store.fetch("b") as folder:
        assert ckpt.verify(folder)["global_step"] == 1
        assert ckpt.load_training(folder) == {"step": 1}
    with store.fetch("a", manifest_alone=True) as folder:
        assert ckpt.read_manifest(folder)["global_step"] == 0


def test_a_checkpoint_is_replaced_whole(store: Store) -> None:
    """Writing over a checkpoint leaves the new one, and no trace of the old."""
    fill(store, "a")
    store.write("a", snapshot(epoch=2))
    with store.fetch("a") as folder:
        assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "weights.safetensors"]
        assert ckpt.verify(folder)["epoch"] == 2


def test_all_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and the draft's folder are flushed, then the draft is renamed,
    then its parent is flushed: power may fail.
    """
    events: list[str] = []
    rename, sync = Path.rename, os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd)),
    )
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (events.append(f"-> {Path(to).name}"), rename(path, to))[1]
    )
    store = store_of(tmp_path)
    store.write("a", snapshot(epoch=1))
    at = events.index("-> a")
    assert {"manifest.json", "weights.safetensors"} < set(events[:at]) and [
        e for e in events[:at] if e.endswith(".draft")
    ]
    assert events[at + 1 :] == [store.folder.name]


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    """Also a complete one, whose rank was killed before the rename."""
    store = store_of(tmp_path)
    fill(store, "a")
    shutil.copytree(store.folder / "a", store.folder / ".b.4711.draft")
    assert store.names() == ["a"]


def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """Beyond the first megabyte, too."""
    store = store_of(tmp_path)
    store.write("a", snapshot(nn.Linear(700, 800)))
    path = store.folder / "a" / "weights.safetensors"
    held = bytearray(path.read_bytes())
    held[-5] ^= 1
    path.write_bytes(held)
    with pytest.raises(CheckpointError, match="is not what was written"):
        ckpt.verify(store.folder / "a")


def test_links_move(store: Store) -> None:
    """`last` means one checkpoint, and then another."""
    assert store.target("last") is None
    fill(store, "a", "b")
    for name in ("a", "b"):
        store.point("last", name)
        assert store.target("last") == name
    assert store.names() == ["a", "b"]


def test_a_removed_checkpoint_is_gone(store: Store) -> None:
    """A removed checkpoint no longer exists, and removing it again is no error."""
    fill(store, "a", "b")
    store.remove("a")
    store.remove("a")
    assert store.names() == ["b"]


def test_a_failing_write_leaves_the_old_checkpoint(store: Store) -> None:
    """A write that fails half way leaves the checkpoint that it would have replaced,
    and nothing else.
    """
    fill(store, "a")
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.write("a", snapshot(about=object()))
    with store.fetch("a") as folder:
        assert ckpt.verify(folder)["global_step"] == 0
    assert store.names() == ["a"]


def test_a_checkpoint_is_a_folder_of_three_files(tmp_path: Path) -> None:
    """Weights, training state and manifest lie in one folder, and nothing else beside it."""
    folder = written(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        "training.pt",
        "weights.safetensors",
    ]
    assert [p.name for p in folder.parent.iterdir()] == ["one"]


@pytest.mark.parametrize(("weights", "training"), [(100_000, 1), (1, 100_000)])
def test_a_full_disk_is_an_oserror_and_leaves_nothing(
    tmp_path: Path, weights: int, training: int
) -> None:
    """If the disk is full at the weights or the training state,
    nothing is left and the error is an OSError.
    """
    with small_disk(50_000), pytest.raises(OSError, match=r"."):
        written(tmp_path, "big", nn.Linear(weights, 1), {"state": torch.zeros(training)})
    assert list(store_of(tmp_path).folder.iterdir()) == []


def test_the_umask_sets_the_permissions(tmp_path: Path) -> None:
    """The user's umask sets the permissions of all files of a checkpoint."""
    modes = {path.stat().st_mode & 0o777 for path in written(tmp_path).iterdir()}
    (tmp_path / "other").touch()
    assert modes == {(tmp_path / "other").stat().st_mode & 0o777}


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    """A folder of the user's own in a checkpoint's place is refused, and left alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        LocalStore(tmp_path).write("mine", snapshot())
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_link_is_relative(tmp_path: Path) -> None:
    """`last` is a relative link: a run's folder can be moved."""
    store = store_of(tmp_path)
    fill(store, "a")
    store.point("last", "a")
    assert os.readlink(store.folder / "last") == "a"


def test_tidy_takes_away_what_a_killed_writer_left(tmp_path: Path) -> None:
    """Drafts are removed; a checkpoint that was being replaced is restored; foreign files stay."""
    store = store_of(tmp_path)
    fill(store, "a", "b")
    for name in (".c.123.draft", ".b.77.before", ".notes", ".d.e"):
        (store.folder / name).mkdir()
    (store.folder / "a").rename(store.folder / ".a.55.before")
    (store.folder / ".last.9.draft").symlink_to("a")
    (store.folder / ".c.123.draft" / ".tmpab12").touch()  # what safetensors was writing
    for name in (".python.3", ".cache.before"):  # the user's own
        (store.folder / name).mkdir()
        (store.folder / name / "precious").touch()
    store.tidy()
    assert sorted(p.name for p in store.folder.iterdir()) == [
        ".cache.before",
        ".d.e",
        ".notes",
        ".python.3",
        "a",
        "b",
    ]
    assert (store.folder / ".python.3" / "precious").exists()
    ckpt.verify(store.folder / "a")


class Broken(Exception):
    """An error of a library behind fsspec: no OSError."""


def test_a_remote_failure_is_an_oserror_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a remote file system raises comes out as OSError,
    and the half-written checkpoint is taken away.
    """
    store = make_store(f"memory://{uuid.uuid4().hex}/checkpoints")
    assert isinstance(store, RemoteStore)
    put = type(store._files).put_file

    def fails(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith("weights.safetensors"):
            raise Broken("no more quota")
        put(self, source, target, **options)

    monkeypatch.setattr(type(store._files), "put_file", fails)
    with pytest.raises(OSError, match=r"Broken: no more quota"):
        store.write("a", snapshot(training={"x": 1}))
    assert store.names() == []
    assert not fsspec.filesystem("memory").exists(store.path_of("a"))


def memory_store() -> RemoteStore:
    """Return a store at a URL of this process."""
    store = make_store(f"memory://{uuid.uuid4().hex}/checkpoints")
    assert isinstance(store, RemoteStore)
    return store


def step_in(store: Store, name: str) -> int:
    """Return the step of a checkpoint, which is whole."""
    with store.fetch(name) as folder:
        return int(ckpt.verify(folder)["global_step"])


def folders_in(store: Store) -> list[str]:
    """Return what there is at a URL of this process."""
    return [path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls(store.place, False)]


@pytest.mark.parametrize("file", ["weights.safetensors", "training.pt", "manifest.json"])
def test_a_failed_upload_leaves_the_checkpoint_that_it_would_have_replaced(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a URL too, whichever file fails; nothing of the new one stays."""
    store = memory_store()
    fill(store, "a")
    put = MemoryFileSystem.put_file

    def fails(self: Any, source: str, target: str, **options: Any) -> None:
        if target.endswith(file):
            raise Broken("no more quota")
        put(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    with pytest.raises(OSError, match=r"Broken: no more quota"):
        store.write("a", snapshot(training={"x": 1}, global_step=1))
    assert (store.names(), folders_in(store), step_in(store, "a")) == (["a"], ["a"], 0)


class Killed(BaseException):
    """What ends a writer in the middle."""


def killed_at(patch: pytest.MonkeyPatch, change: int) -> None:
    """Let a file system in memory take no change from this one on."""
    remaining = [change]

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def change_once(*arguments: Any, **options: Any) -> Any:
            if not remaining[0]:
                raise Killed
            remaining[0] -= 1
            return method(*arguments, **options)

        return change_once

    for name in ("put_file", "rm_file", "cp_file", "rmdir"):
        patch.setattr(MemoryFileSystem, name, wrapped(getattr(MemoryFileSystem, name)))


def test_a_checkpoint_at_a_url_is_whole_whenever_the_writer_that_replaces_it_is_killed() -> None:
    """It is the former one or the new one after each change; the next writer replaces it, and
    leaves nothing beside it.
    """
    seen: list[int] = []
    for change in itertools.count():
        store = memory_store()
        fill(store, "a")
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, change)
            try:
                store.write("a", snapshot(training={"x": 1}, global_step=1))
            except Killed:
                pass
            else:
                break
        assert store.names() == ["a"]
        seen.append(step_in(store, "a"))
        if change % 2:
            store.tidy()
            assert step_in(store, "a") == seen[-1]
        store.write("a", snapshot(global_step=2))
        assert (step_in(store, "a"), folders_in(store)) == (2, ["a"])
        store.remove("a")
        assert store.names() == []
    assert seen == sorted(seen) and {*seen} == {0, 1}


def test_a_checkpoint_that_cannot_be_copied_to_its_place_is_read_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store without copies has it under its name nevertheless; one that answers again gets it
    into its place at the next start.
    """
    store = memory_store()
    fill(store, "a")
    with monkeypatch.context() as patch:
        patch.delattr(MemoryFileSystem, "cp_file")
        store.write("a", snapshot(global_step=1))
        assert (store.names(), step_in(store, "a")) == (["a"], 1)
        store.write("a", snapshot(global_step=2))
        assert (folders_in(store), step_in(store, "a")) == (["a"], 2)
        store.write("a", snapshot(global_step=3))
    assert (store.names(), step_in(store, "a")) == (["a"], 3)
    store.tidy()
    assert (folders_in(store), step_in(store, "a")) == (["a"], 3)


def test_a_reader_of_a_url_sees_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the files are going up there is no checkpoint; the manifest comes last."""
    store = make_store(f"memory://{uuid.uuid4().hex}/checkpoints")
    assert isinstance(store, RemoteStore)
    seen: list[list[str]] = []
    put = type(store._files).put_file

    def watched(self: Any, *args: Any, **options: Any) -> None:
        put(self, *args, **options)
        seen.append(store.names())

    monkeypatch.setattr(type(store._files), "put_file", watched)
    store.write("a", snapshot(training={"x": 1}))
    assert seen == [[], [], ["a"]]


def test_an_unknown_protocol_is_refused() -> None:
    """A URL that no file system is known for is refused, with the URL."""
    with pytest.raises(ConfigError, match=r"'ftpp://host/x' cannot be written to: .*ftpp"):
        make_store("ftpp://host/x")


def test_a_copied_link_gives_way(tmp_path: Path) -> None:
    """Where `last` became a real folder (a copy that followed links), it becomes a link again."""
    for name in ("a", "last"):
        LocalStore(tmp_path).write(name, snapshot())
    LocalStore(tmp_path).point("last", "a")
    assert (tmp_path / "last").is_symlink()
