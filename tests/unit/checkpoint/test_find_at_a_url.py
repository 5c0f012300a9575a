"""Which checkpoint at a URL is resumed from, if an answer of its store is damaged,
or other objects lie beside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.checkpoints import fill, line, load
from tests.helpers.object_store import ObjectStore, serve, within
from trainkit.checkpoint.find import fetched
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import Store
from trainkit.errors import CheckpointError

FILES = ["manifest.json", "training.pt", "weights.safetensors"]
Damage = Callable[[str, int], None]


@pytest.fixture
def store() -> Store:
    """A store of this process with the checkpoints a and b."""
    store = make_store(f"memory://{uuid.uuid4().hex}/run")
    fill(store, "a", "b")
    return store


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Damage:
    """A function: of the next `times` answers for a file of checkpoint b,
    the last byte is another.
    """
    get = MemoryFileSystem.get_file

    def damage(file: str, times: int) -> None:
        remaining = [times]

        def get_file(
            self: MemoryFileSystem, path: str, to: str, *args: Any, **options: Any
        ) -> None:
            get(self, path, to, *args, **options)
            if path.endswith(f"/b/{file}") and remaining[0]:
                remaining[0] -= 1
                content = Path(to).read_bytes()
                Path(to).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

        monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)

    return damage


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_answer_is_asked_for_again(
    store: Store, damage: Damage, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """The run resumes from the newest checkpoint although one answer of the store was damaged;
    that is printed.
    """
    damage(file, 1)
    said: list[str] = []
    assert load("auto", [store], line(), resume=True, say=said.append) == (
        store.path_of("b"),
        {"step": 1},
    )
    assert said == []
    assert (
        f"{store.path_of('b')}/{file} did not arrive as it was written, and is asked for again"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("file", FILES)
def test_what_is_damaged_twice_is_damaged(store: Store, damage: Damage, file: str) -> None:
    """If all answers are damaged, the checkpoint is named by its URL,
    and the one before it is taken.
    """
    damage(file, 100)
    said: list[str] = []
    assert load("auto", [store], line(), resume=True, say=said.append) == (
        store.path_of("a"),
        {"step": 0},
    )
    assert (
        len(said) == 1
        and said[0].startswith(f"{store.path_of('b')} is ")
        and "The one before it is taken." in said[0]
    )


def test_a_rank_that_fetches_for_itself_compares_what_arrives(store: Store, damage: Damage) -> None:
    """Each rank that reads its part of a checkpoint downloads it;
    one with damaged weights raises, and names the URL.
    """
    damage("weights.safetensors", 2)
    with pytest.raises(
        CheckpointError,
        match=r"^memory://\w+/run/b is damaged: weights.safetensors is not what was written",
    ):
        fetched(store.path_of("b")).__enter__()


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectStore]:
    """A server, and this process led to it."""
    with serve() as served, within(served.environment):
        yield served


@pytest.mark.parametrize(
    "key",
    [
        "notes/manifest.json",
        "notes/manifest.json/x",
        "b/notes/x",
        "b/notes/",
        "b/",
        "notes.txt",
        "manifest.json",
    ],
)
def test_other_objects_beside_checkpoints_are_left_alone(bucket: ObjectStore, key: str) -> None:
    """An object that belongs to no checkpoint neither ends `auto` nor is it named:
    with checkpoints there, and without.
    """
    files = fsspec.filesystem("s3")
    for names in ((), ("a", "b")):
        store = make_store(f"{bucket.url}/{uuid.uuid4().hex}")
        fill(store, *names)
        where, _, path = store.path_of(key).removeprefix("s3://").partition("/")
        files.call_s3("put_object", Bucket=where, Key=path, Body=b"")
        said: list[str] = []
        expected = (store.path_of("b"), {"step": 1}) if names else None
        assert load("auto", [store], line(), resume=True, say=said.append) == expected
        assert said == [] and store.names() == [*names]


def test_a_checkpoint_is_replaced_in_an_object_store(bucket: ObjectStore) -> None:
    """The new one is whole under its name, and nothing else is there."""
    store = make_store(f"{bucket.url}/{uuid.uuid4().hex}")
    fill(store, "a", "b", "a")
    assert load("auto", [store], line(), resume=True) == (store.path_of("a"), {"step": 2})
    there = fsspec.filesystem("s3").find(store.place)
    assert sorted(path.split("/", 2)[2] for path in there) == [
        f"{name}/{file}" for name in ("a", "b") for file in FILES
    ]
