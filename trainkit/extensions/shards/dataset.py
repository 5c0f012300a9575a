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

from trainkit.errors import DataError
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.index import Index
from trainkit.extensions.shards.tar import Members

_MOST_OPEN = 256


@dataclass(frozen=True)
class Sample:
    """A sample as it is stored.

    Attributes:
        files: extension -> content, as {"jpg": ..., "cls": b"3"}.
        describe: returns its shard and its key, for messages.
    """

    files: Mapping[str, bytes]
    describe: Callable[[], str]


class ShardDataset(Dataset[Any]):
    """A map-style data set over shards; index 0 is the first sample of the first shard.

    Args:
        index: the shards.
        cache: opens them.
        decode: makes a sample of its files; None returns the Sample.
    """

    def __init__(
        self, index: Index, cache: ShardCache, decode: Callable[[Sample], Any] | None = None
    ) -> None:
        self.index = index
        self.cache = cache
        self.decode = decode
        self.classes = list(index.classes)
        self._open: OrderedDict[int, tuple[BinaryIO, Members]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards; the next sample opens its own again."""
        while self._open:
            self._open.popitem()[1][0].close()

    def __len__(self) -> int:
        return self.index.num_samples

    def __getitem__(self, index: int) -> Any:
        number, place = self.index.locate(index)
        file, members = self._opened(number)
        descriptor = file.fileno()  # pread: workers that were forked share the file's position
        files = {
            kind: os.pread(descriptor, size, offset)
            for kind, (offset, size) in members[place].items()
        }
        sample = Sample(files, lambda: f"{self.index.shards[number].url}: {members.key_of(place)}")
        return sample if self.decode is None else self.decode(sample)

    def file_of(self, index: int) -> str:
        """Return a sample's shard, for messages."""
        return self.index.shards[self.index.locate(index)[0]].url

    def _opened(self, number: int) -> tuple[BinaryIO, Members]:
        held = self._open.get(number)
        if held is not None:
            self._open.move_to_end(number)
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
        self._open[number] = file, members
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1][0].close()
        return file, members
