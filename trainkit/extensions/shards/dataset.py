"""ShardDataset: the samples of shards by index, for any loader and any order;
ShardOrder's is kind to shards.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from torch.utils.data import Dataset

from trainkit.errors import ConfigError, DataError
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.index import Index
from trainkit.extensions.shards.tar import Members

_MOST_OPEN = 256  # of the files that a process may open, often 1024
_IDLE = 10  # rounds without a sample after which a shard's window is past


@dataclass(frozen=True)
class Sample:
    """A sample as it is stored.

    Attributes:
        files: extension -> content, as {"jpg": ..., "cls": b"3"}.
        describe: returns its shard and its key, for messages.
    """

    files: Mapping[str, bytes]
    describe: Callable[[], str]


@dataclass
class _Open:
    """A shard that is open.

    Attributes:
        used: the number of its last sample among those that were read.
    """

    file: BinaryIO
    members: Members
    used: int


class ShardDataset(Dataset[Any]):
    """A map-style data set over shards; index 0 is the first sample of the first shard.

    Args:
        index: the shards.
        cache: opens them.
        decode: makes a sample of its files; None returns the Sample.
        num_open: shards that stay open, 256 at most: those that are read beside each other. With
            fewer a shard is opened again and again, and checked each time; with more, shards that
            the cache has evicted stay on the disk until they have not been read for long.
    """

    def __init__(
        self,
        index: Index,
        cache: ShardCache,
        decode: Callable[[Sample], Any] | None = None,
        num_open: int = _MOST_OPEN,
    ) -> None:
        self._open: OrderedDict[int, _Open] = OrderedDict()
        if num_open < 1:
            raise ConfigError(f"num_open is {num_open}; it must be 1 or more.")
        self.index = index
        self.cache = cache
        self.decode = decode
        self.classes = list(index.classes)
        self.num_open = min(num_open, _MOST_OPEN)
        self._num_read = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards; the next sample opens its own again."""
        while self._open:
            self._open.popitem()[1].file.close()

    def __len__(self) -> int:
        return self.index.num_samples

    def __getitem__(self, index: int) -> Any:
        number, place = self.index.locate(index)
        held = self._opened(number)
        members = held.members
        descriptor = held.file.fileno()  # pread: workers that were forked share the file's position
        files = {
            kind: _read(descriptor, size, offset) for kind, (offset, size) in members[place].items()
        }
        for kind, (offset, size) in members[place].items():
            if len(files[kind]) < size:
                raise DataError(
                    f"{self.index.shards[number].url}: the file '{kind}' of its sample {place}"
                    f" (from 0) has {size:,} bytes from byte {offset:,} on, and"
                    f" {len(files[kind]):,} can be read. It was truncated after it was opened: write"
                    " it again; one in data.cache_dir is fetched again when the run resumes."
                )
        sample = Sample(files, lambda: f"{self.index.shards[number].url}: {members.key_of(place)}")
        return sample if self.decode is None else self.decode(sample)

    def file_of(self, index: int) -> str:
        """Return a sample's shard, for messages."""
        return self.index.shards[self.index.locate(index)[0]].url

    def _opened(self, number: int) -> _Open:
        self._num_read += 1
        held = self._open.get(number)
        if held is not None:
            self._open.move_to_end(number)
            held.used = self._num_read
            return held
        shard = self.index.shards[number]
        file = self.cache.open(shard)
        members = Members(file, shard.url)
        if len(members) != shard.samples:
            file.close()
            raise DataError(
                f"{shard.url} holds {len(members):,} samples; its index promises {shard.samples:,}."
                " Remove the index, so that it is made again."
            )
        held = self._open[number] = _Open(file, members, self._num_read)
        self._close_past()
        return held

    def _close_past(self) -> None:
        """Close the longest unread shards: those above `num_open`, and evicted ones whose window is
        past, as the file system keeps their bytes until they are closed.
        """
        past = self._num_read - _IDLE * self.num_open
        for number, held in list(self._open.items()):
            is_past = held.used < past and os.fstat(held.file.fileno()).st_nlink == 0
            if is_past or len(self._open) > self.num_open:
                self._open.pop(number).file.close()


def _read(descriptor: int, size: int, offset: int) -> bytes:
    """Return so many bytes, or those up to the end of the file; Linux returns 2 GiB at most."""
    content = os.pread(descriptor, size, offset)
    while 0 < len(content) < size:
        more = os.pread(descriptor, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content
