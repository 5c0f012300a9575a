"""ShardDataset: which shards stay open, and that a file of a sample is read as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.extensions.shards.test_tar import write
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.dataset import ShardDataset
from trainkit.extensions.shards.index import Index, Shard
from trainkit.extensions.shards.order import ShardOrder
from trainkit.extensions.shards.store import ShardStore

SAMPLES = 4


class CopyingStore(ShardStore):
    """Of a folder, as if it was far away; it lists the shards that are fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.fetched: list[str] = []

    def fetch(self, url: str, path: Path) -> None:
        """Copy a shard."""
        name = url.rpartition("/")[2]
        self.fetched.append(name)
        path.write_bytes((self.folder / name).read_bytes())


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Twelve shards of four samples, in a folder and, by their URLs, far away."""
    shards = []
    for number in range(12):
        files = {f"{i}.txt": f"{number} {i}".encode() for i in range(SAMPLES)}
        path = write(tmp_path / f"{number}.tar", files)
        shards.append(Shard(f"far://away/{path.name}", SAMPLES, path.stat().st_size))
    return Index(tuple(shards))


def cache_of(num_shards: int, index: Index, folder: Path) -> tuple[ShardCache, CopyingStore]:
    """Return a cache with room for some shards, and the store that it fetches from."""
    store = CopyingStore(folder)
    return ShardCache(folder / "cache", num_shards * index.shards[0].size, store), store


def held_on_disk(cache: ShardCache) -> int:
    """Return how many evicted shards this process holds open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(link.startswith(f"{cache.folder}/") and "(deleted)" in link for link in links)


def test_shards_of_past_windows_are_closed(index: Index, tmp_path: Path) -> None:
    """A reader of windows of two holds no more evicted shards than these, whatever the length of
    the epoch, and opens each shard once.
    """
    cache, store = cache_of(3, index, tmp_path)
    dataset = ShardDataset(index, cache, num_open=2)
    held = []
    for i in ShardOrder(index, 2).order_of(3, 0):
        _ = dataset[i]
        held.append(held_on_disk(cache))
    assert max(held) <= 2, held
    assert sorted(store.fetched) == sorted(shard.name for shard in index.shards)


def test_an_evicted_shard_that_is_read_no_more_is_closed(index: Index, tmp_path: Path) -> None:
    """Also where as many may stay open: after ten rounds without a sample of it. One that the cache
    holds stays open, and one that is read, too.
    """
    cache, _ = cache_of(12, index, tmp_path)
    dataset = ShardDataset(index, cache, num_open=4)
    for shard in (0, 1, 2):
        _ = dataset[shard * SAMPLES]
    for shard in (0, 2):
        cache.path_of(index.shards[shard]).unlink()
    for _ in range(41):
        assert dataset[2 * SAMPLES].files == {"txt": b"2 0"}
    assert held_on_disk(cache) == 2
    _ = dataset[3 * SAMPLES]
    assert sorted(dataset._open) == [1, 2, 3] and held_on_disk(cache) == 1


def test_a_reader_opens_one_shard_at_least(index: Index, tmp_path: Path) -> None:
    """None is refused; more than a process may open are not taken."""
    cache, _ = cache_of(12, index, tmp_path)
    with pytest.raises(ConfigError, match="num_open is 0; it must be 1 or more"):
        ShardDataset(index, cache, num_open=0)
    assert ShardDataset(index, cache, num_open=2000).num_open == 256


def local(index: Index, folder: Path) -> Index:
    """Return the index of the same shards in their folder."""
    return Index(
        tuple(Shard(str(folder / shard.name), shard.samples, shard.size) for shard in index.shards)
    )


def test_a_file_is_read_in_as_many_parts_as_it_comes(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux returns 2 GiB at most."""
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: read(file, min(size, 2), offset))
    dataset = ShardDataset(local(index, tmp_path), cache_of(1, index, tmp_path)[0])
    assert dataset[11 * SAMPLES + 3].files == {"txt": b"11 3"}


@pytest.mark.parametrize("rest", [0, 3])
def test_a_shard_that_is_truncated_while_it_is_open_is_named(
    rest: int, index: Index, tmp_path: Path
) -> None:
    """With the sample, and its bytes; those before the cut are read."""
    dataset = ShardDataset(local(index, tmp_path), cache_of(1, index, tmp_path)[0])
    assert dataset[11 * SAMPLES].files == {"txt": b"11 0"}
    offset, _ = dataset._open[11].members[1]["txt"]
    os.truncate(tmp_path / "11.tar", offset + rest)
    said = (
        rf"11\.tar: the file 'txt' of its sample 1 .* 4 bytes from byte {offset:,} on, and {rest}"
    )
    with pytest.raises(DataError, match=said):
        dataset[11 * SAMPLES + 1]
    assert dataset[11 * SAMPLES].files == {"txt": b"11 0"}


def test_an_empty_file_is_one(tmp_path: Path) -> None:
    """Also as the last one of its shard."""
    path = write(tmp_path / "a.tar", {"0.jpg": b"picture", "0.txt": b""})
    shard = Shard(str(path), 1, path.stat().st_size)
    dataset = ShardDataset(Index((shard,)), ShardCache(tmp_path / "cache", 1, ShardStore()))
    assert dataset[0].files == {"jpg": b"picture", "txt": b""}
