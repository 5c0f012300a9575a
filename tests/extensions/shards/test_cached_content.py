"""A cached shard is what its index says each time that it is opened,
and the cache keeps its limit beside other jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.index import Shard
from trainkit.extensions.shards.store import ShardStore

CONTENT = {f"memory://train/{name}.tar": name.encode() * 100 for name in "abc"}
SHARDS = [
    Shard(url, 1, 100, hashlib.sha256(content).hexdigest()) for url, content in CONTENT.items()
]


class CountingStore(ShardStore):
    """Of three shards in memory; it lists the URLs of its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def fetch(self, url: str, path: Path) -> None:
        """Write the shard, if the files of the cache have room for it."""
        files = [file for file in path.parent.iterdir() if file.is_file() and file != path]
        assert 100 + 100 * len(files) <= 250, files
        self.fetched.append(url)
        path.write_bytes(CONTENT[url])


def change_a_byte(path: Path) -> None:
    """Change one byte of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def truncate(path: Path) -> None:
    """Leave half of a file."""
    os.truncate(path, 50)


def write_another_shard(path: Path) -> None:
    """Give a file the content of another shard."""
    path.write_bytes(CONTENT[SHARDS[2].url])


@pytest.mark.parametrize("damage", [change_a_byte, truncate, write_another_shard])
def test_a_damaged_file_is_fetched_again(
    damage: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is compared with the index when it is opened;
    the damage is printed once, and the store is asked once more.
    """
    cache = ShardCache(tmp_path, 250, CountingStore())
    cache.open(SHARDS[0]).close()
    assert callable(damage)
    damage(cache.path_of(SHARDS[0]))
    for _ in range(2):
        with cache.open(SHARDS[0]) as file:
            assert file.read() == CONTENT[SHARDS[0].url]
    assert cache.store.fetched == [SHARDS[0].url] * 2  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    assert (
        printed.count(f"a.tar in data.cache_dir={tmp_path} has ") == 1
        and "fetched again" in printed
    )


class BesideAnotherJob(ShardCache):
    """A cache in which another job is fetching: it completes its shard if this one waits for it."""

    def __init__(self, folder: Path, other: Shard) -> None:
        super().__init__(folder, 250, CountingStore())
        self.part = folder / f"{self.path_of(other).name}.{other.size}.part"
        self.part.write_bytes(b"")
        self.lock = self._lock_file(self.path_of(other).name)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Let the other job end when this one waits for it."""
        if self.part.name.startswith(name):
            self.part.write_bytes(CONTENT[SHARDS[1].url])
            self.part.replace(self.folder / name)
            self.lock.close()
        with super().locked(name):
            yield


def test_the_limit_holds_while_another_job_fetches(tmp_path: Path) -> None:
    """A shard for which the other's unfinished ones leave no room waits for one of them,
    and then evicts.
    """
    (tmp_path / "locks").mkdir()
    cache = BesideAnotherJob(tmp_path, SHARDS[1])
    cache.open(SHARDS[0]).close()
    cache.max_bytes = 150
    cache.open(SHARDS[2]).close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        cache.path_of(SHARDS[2]).name
    ]


def test_what_a_killed_process_left_of_a_shard_is_no_reason_to_wait(tmp_path: Path) -> None:
    """Its unfinished file is removed by the next one that fetches the shard."""
    cache = ShardCache(tmp_path, 100, CountingStore())
    (tmp_path / f"{cache.path_of(SHARDS[0]).name}.100.part").write_bytes(b"half")
    cache.open(SHARDS[0]).close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        cache.path_of(SHARDS[0]).name
    ]


def test_a_shard_has_its_name_after_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is flushed as a draft,
    so that a crash of the host leaves no empty file under the shard's name.
    """
    cache, flushed = ShardCache(tmp_path, 250, CountingStore()), list[bool]()
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (flushed.append(cache.path_of(SHARDS[0]).exists()), fsync(descriptor)),
    )
    cache.open(SHARDS[0]).close()
    assert flushed == [False]
