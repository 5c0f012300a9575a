"""Makes the index of shards that other programs wrote, by reading each of them once."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainkit.console import plural
from trainkit.errors import DataError
from trainkit.extensions.shards.cache import ShardCache, sha256_of
from trainkit.extensions.shards.index import INDEX, Index, Shard, find_index, index_of
from trainkit.extensions.shards.store import is_local
from trainkit.extensions.shards.tar import Members

_AT_ONCE = 8


def index_for(
    urls: Sequence[str], cache: ShardCache, label: str, say: Callable[[str], object]
) -> Index:
    """Return the index of these shards: that beside them, that of an earlier run, or a new one.

    Args:
        label: the extension of a sample's label, to count the labels of a shard.
        say: prints.
    """
    root, _, _ = urls[0].rpartition("/")
    beside = (
        find_index(root, cache.store)
        if all(url.rpartition("/")[0] == root for url in urls)
        else None
    )
    if beside is not None and {shard.url for shard in beside.shards} >= {*urls}:
        chosen = {*urls}
        return Index(tuple(shard for shard in beside.shards if shard.url in chosen), beside.classes)
    sizes = _sizes(urls, cache)
    index_file = (
        cache.folder
        / "indexes"
        / f"{hashlib.sha256(json.dumps([*zip(urls, sizes, strict=True)]).encode()).hexdigest()[:16]}.json"
    )
    with cache.locked(index_file.name):
        if index_file.is_file():
            return index_of(index_file.read_bytes(), root, str(index_file))
        say(
            f"{root} has no {INDEX} of these shards: {plural(len(urls), 'shard')}"
            f" ({sum(sizes) / 1e9:.2f} GB) are read once to make it"
        )
        index = Index(tuple(_read(urls, sizes, cache, label)))
        index_file.parent.mkdir(parents=True, exist_ok=True)
        draft = index_file.with_suffix(".draft")
        draft.write_bytes(index.to_json())
        draft.replace(index_file)
    say(f"the index is made: {index.num_samples:,} samples; {index_file}")
    return index


def _sizes(urls: Sequence[str], cache: ShardCache) -> list[int]:
    def size(url: str) -> int:
        try:
            return cache.store.size(url)
        except FileNotFoundError as error:
            raise DataError(
                f"{url} does not exist. Check data.root or data.urls: each shard that they name is"
                " read."
            ) from error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(size, urls))


def _read(urls: Sequence[str], sizes: Sequence[int], cache: ShardCache, label: str) -> list[Shard]:
    def read(url: str, size: int) -> Shard:
        with cache.open(Shard(url, 0, size)) as file:
            members = Members(file, url)
            labels = set()
            for place in range(len(members)):
                at = members[place].get(label)
                if at is not None:
                    file.seek(at[0])
                    labels.add(file.read(at[1]))
            file.seek(0)
            # what is read in place is not copied, and not checked
            checksum = "" if is_local(url) else sha256_of(file)
        shard = Shard(url, len(members), size, checksum, len(labels))
        with contextlib.suppress(FileNotFoundError):  # it was evicted
            # the name in the cache has the checksum
            cache.path_of(Shard(url, 0, size)).replace(cache.path_of(shard))
        return shard

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        shards = list(pool.map(read, urls, sizes))
    empty = [shard.url for shard in shards if not shard.samples]
    if len(empty) == len(shards):
        raise DataError(
            f"{urls[0]} and the other shards hold no samples: files named KEY.EXTENSION, as"
            " 0001.jpg and 0001.cls."
        )
    return [shard for shard in shards if shard.samples]
