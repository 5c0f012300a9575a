"""ShardCache and ShardDataset on a real S3 server: what is fetched, what stays, what is refused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.helpers.object_store import ObjectStore, serve, within
from tests.helpers.pictures import write_pictures
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.dataset import ShardDataset
from trainkit.extensions.shards.index import Index, find_index, urls_of
from trainkit.extensions.shards.index_maker import index_for
from trainkit.extensions.shards.order import ShardOrder
from trainkit.extensions.shards.packer import pack, plan_of
from trainkit.extensions.shards.store import ShardStore


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server; its bucket holds 48 images in shards, in train/."""
    images = write_pictures(tmp_path_factory.mktemp("images"), 48, 0)
    with serve() as store, within(store.environment):
        (packing,) = plan_of(images, store.url, 12_000)
        pack(packing, ShardStore())
        yield store


@pytest.fixture
def index(bucket: ObjectStore) -> Index:
    """Return the index of the shards in the bucket."""
    found = find_index(f"{bucket.url}/train", ShardStore())
    assert found is not None
    return found


def cached(cache: ShardCache) -> list[str]:
    """Return the shards that a cache holds."""
    return sorted(path.name.rpartition("-")[2] for path in cache.folder.glob("*.tar"))


def test_the_longest_unused_shard_is_evicted(index: Index, tmp_path: Path) -> None:
    """The cache stays below its size;
    a shard used again stays, one evicted is fetched again, and an open one is readable.
    """
    size = max(shard.size for shard in index.shards)
    cache = ShardCache(tmp_path, 3 * size, ShardStore())
    with cache.open(index.shards[0]) as first:
        for number in (1, 2):
            cache.open(index.shards[number]).close()
        os.utime(cache.path_of(index.shards[0]), (1, 1))
        cache.open(index.shards[3]).close()
        assert cached(cache) == ["000001.tar", "000002.tar", "000003.tar"]
        assert len(first.read()) == index.shards[0].size
    os.utime(cache.path_of(index.shards[2]), (2, 2))
    os.utime(cache.path_of(index.shards[1]), (1, 1))
    cache.open(index.shards[1]).close()  # used now
    cache.open(index.shards[0]).close()
    assert cached(cache) == ["000000.tar", "000001.tar", "000003.tar"]


def read_all(folder: Path, index: Index, max_bytes: int, worker: int, results: Any) -> None:
    """Read an epoch's order, as a loader worker, and return the labels."""
    dataset = ShardDataset(index, ShardCache(folder, max_bytes, ShardStore()))
    order = ShardOrder(index, 2).order_of(0, worker)
    results.put([dataset[i].files["cls"].decode() for i in order])


def test_workers_share_a_small_cache(index: Index, tmp_path: Path) -> None:
    """Two processes read all samples in orders of their own, of a cache of three shards:
    each gets all of them.
    """
    size = max(shard.size for shard in index.shards)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=read_all, args=(tmp_path, index, 3 * size, i, results))
        for i in range(2)
    ]
    for worker in workers:
        worker.start()
    for labels in [results.get(timeout=100) for _ in workers]:
        assert sorted(labels) == sorted("0123" * 12)
    for worker in workers:
        worker.join()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tar*")) <= 3 * size


def test_a_shard_gets_its_name_while_none_makes_room(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lists the files to make room would else see neither the part nor the shard, and the cache
    would grow beyond its size.
    """
    cache = ShardCache(tmp_path, 10**9, ShardStore())
    is_whole, shard = threading.Event(), index.shards[0]
    monkeypatch.setattr(os, "fsync", lambda _: is_whole.set())
    reader = threading.Thread(target=cache.fetch, args=(shard,))
    with cache.locked("room"):
        part = tmp_path / f"{cache.path_of(shard).name}.{shard.size}.part"
        monkeypatch.setattr(cache, "_reserve", lambda *_: part.touch())
        reader.start()
        assert is_whole.wait(60)
        reader.join(0.3)  # an error would be here by now: the shard has its name in no time
        assert cached(cache) == [] and part.exists()
    reader.join(60)
    assert cached(cache) == [shard.name]


def test_shards_are_fetched_ahead(index: Index, tmp_path: Path) -> None:
    """The first sample of a window brings its shards and the next window's;
    closing waits for them.
    """
    cache = ShardCache(tmp_path, 10**9, ShardStore())
    order = ShardOrder(
        index, 2, ahead=lambda numbers: cache.fetch_ahead(index.shards[i] for i in numbers)
    ).order_of(0, 0)
    _ = order[0]
    assert cache._pool is not None
    cache._pool.shutdown(wait=True)
    assert len(cached(cache)) == 4
    cache.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"size": 1},
            (
                r"000000\.tar has [\d,]+ bytes; its index promises 1 bytes of another content: it"
                r" is truncated"
            ),
        ),
        ({"sha256": "0" * 64}, r"000000\.tar has another checksum"),
        ({"url": "s3://images/train/9.tar"}, r"9\.tar does not exist; its index lists it"),
        ({"url": "s3://nowhere/9.tar"}, r"s3://nowhere/9\.tar does not exist"),
    ],
)
def test_another_content_is_refused(
    change: dict[str, Any], said: str, index: Index, tmp_path: Path
) -> None:
    """By the shard's URL; nothing is left in the cache."""
    cache = ShardCache(tmp_path, 10**9, ShardStore())
    with pytest.raises(DataError, match=said):
        cache.open(replace(index.shards[0], **change))
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "locks"
    ] == []


def test_a_truncated_shard_is_refused(index: Index, bucket: ObjectStore, tmp_path: Path) -> None:
    """With its index by the size that this promises; without one, when its index is made."""
    files, url = fsspec.filesystem("s3"), f"{bucket.url}/cut/0.tar"
    files.pipe_file(url, files.cat_file(index.shards[0].url)[:3000])
    cache = ShardCache(tmp_path, 10**9, ShardStore())
    with pytest.raises(DataError, match=r"cut/0\.tar has 3,000 bytes; its index promises"):
        cache.open(replace(index.shards[0], url=url))
    with pytest.raises(DataError, match=r"cut/0\.tar cannot be read as a tar"):
        index_for([url], cache, "cls", print)
    path = tmp_path / "here.tar"
    path.write_bytes(b"short")
    with pytest.raises(DataError, match=r"here\.tar has 5 bytes; its index promises"):
        cache.open(replace(index.shards[0], url=str(path)))
    with pytest.raises(DataError, match=r"gone\.tar cannot be read \(No such file"):
        cache.open(replace(index.shards[0], url=str(tmp_path / "gone.tar")))


def test_a_full_disk_is_a_sentence(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a fetch, if the disk has too little room; and if it fills up meanwhile.
    Both name the folder and what to do.
    """
    cache = ShardCache(tmp_path, 10**9, ShardStore())
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100)
        )
        with pytest.raises(
            DataError,
            match=(
                r"The disk of data\.cache_dir=.* is full: 000000\.tar needs .* lower"
                r" data\.cache_size"
            ),
        ):
            cache.open(index.shards[0])
    full = ShardCache(tmp_path, 10**9, FullStore())
    with pytest.raises(DataError, match=r"The disk of data\.cache_dir=.* is full"):
        full.open(index.shards[0])
    assert cached(cache) == []


class FullStore(ShardStore):
    """Of this machine, whose disk is full: what a fetch meets on /dev/full."""

    def fetch(self, url: str, path: Path) -> None:
        """Write to a full disk."""
        with open("/dev/full", "wb", buffering=0) as file:
            try:
                file.write(b"x")
            except OSError as error:
                assert error.errno == errno.ENOSPC
                raise DataError(f"{url} cannot be reached") from error


def test_an_unreachable_store_is_named(tmp_path: Path) -> None:
    """The URL, the host's error, and the variables to look at;
    a place that may not be written to is named, too.
    """
    with within(
        {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
        }
    ):
        fsspec.filesystem("s3").clear_instance_cache()
        options = {"config_kwargs": {"retries": {"max_attempts": 0}}}
        with pytest.raises(
            DataError, match=r"s3://images/train/index\.json cannot be reached .* AWS_ENDPOINT_URL"
        ):
            find_index("s3://images/train", ShardStore(options))
    with pytest.raises(ConfigError, match=r"'nothing://a/index\.json' cannot be opened"):
        find_index("nothing://a", ShardStore())
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"data\.cache_dir is '.*file', which cannot be written to"
    ):
        index_for(
            ["memory://a/0.tar"], ShardCache(tmp_path / "file", 1, MemoryStore()), "cls", print
        )


class MemoryStore(ShardStore):
    """Of one file."""

    def size(self, url: str) -> int:
        """Return a size."""
        return 1


def test_a_missing_index_is_made_once(index: Index, bucket: ObjectStore, tmp_path: Path) -> None:
    """From the shards, with their labels counted; it is said, and the next run finds it.
    One beside them is preferred.
    """
    files = fsspec.filesystem("s3")
    for shard in index.shards[:3]:
        files.cp_file(shard.url, shard.url.replace("train", "other"))
    cache, said = ShardCache(tmp_path, 10**9, ShardStore()), list[str]()
    urls = urls_of(f"{bucket.url}/other/0000{{00..02}}.tar", ShardStore(), "data.urls")
    assert urls == urls_of(f"{bucket.url}/other/*.tar", ShardStore(), "data.urls")
    made = index_for(urls, cache, "cls", said.append)
    assert (
        "has no index.json of these shards: 3 shards" in said[0] and "the index is made" in said[1]
    )
    assert [(shard.samples, shard.size, shard.classes) for shard in made.shards] == [
        (shard.samples, shard.size, shard.classes) for shard in index.shards[:3]
    ]
    assert index_for(urls, cache, "cls", said.append).shards == made.shards and len(said) == 2
    beside = index_for([shard.url for shard in index.shards[1:3]], cache, "cls", said.append)
    assert beside.shards == index.shards[1:3] and len(said) == 2


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "s3://images/none-*.tar",
            r"data\.urls is 's3://images/none-\*\.tar', which no file matches",
        ),
        ("a-{x}.tar", "braces hold numbers, letters or a list"),
        ("a-{0,0}.tar", r"data\.urls names a-0\.tar twice"),
    ],
)
def test_a_wrong_pattern_is_explained(pattern: str, said: str, bucket: ObjectStore) -> None:
    """By the setting and what is legal."""
    with pytest.raises(ConfigError, match=said):
        urls_of(pattern, ShardStore(), "data.urls")


def test_patterns_are_spelled_out() -> None:
    """Numbers keep their zeros; several braces multiply."""
    assert urls_of(["a{08..10}.tar"], ShardStore(), "") == ["a08.tar", "a09.tar", "a10.tar"]
    assert urls_of("{x,y}{0..1}.tar", ShardStore(), "") == ["x0.tar", "x1.tar", "y0.tar", "y1.tar"]


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"shardlist": [{"url": "a"}]}', '{"shardlist": []}', '{"shardlist": 3}']
)
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(
        DataError, match=r"index\.json (is no index of shards .* Delete it|lists no samples)"
    ):
        find_index(str(tmp_path), ShardStore())
