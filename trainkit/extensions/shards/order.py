"""ShardOrder: a shuffle in two levels, a function of (seed, epoch) and of its own settings, never
of ranks.

    shards of the epoch in random order, one after the other        | 7 | 2 | 9 | 4 | 1 | 8 | ...
    their samples, cut into `lanes` of equal length                 lane 0: 7 2 9 ...    lane 1: 4 1 8 ...
    each lane in windows of some shards, shuffled within            lane 0: [7 2] [9 ...]
    the lanes take turns, with a microbatch each                    | lane 0 | lane 1 | lane 0 | lane 1 |

Each step takes the next samples of this order, whatever the number of ranks, and the ranks take its
microbatches in turn. So two ranks read a lane each, if there are two lanes: half of the shards.
With one lane every rank reads all of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from trainkit.data.order import mix
from trainkit.errors import ConfigError
from trainkit.extensions.shards.index import Index

Numbers = npt.NDArray[np.int64]


class WindowOrder(Sequence[int]):
    """The order of one epoch: what is held are the windows in use.

    Args:
        ahead: receives the numbers of shards that will soon be read.
    """

    def __init__(
        self,
        index: Index,
        number: int,
        window: int,
        lanes: int,
        turn: int,
        ahead: Callable[[list[int]], object] | None = None,
    ) -> None:
        self._index = index
        self._number = number
        self._window = window
        self._lanes = lanes
        self._ahead = ahead
        self._shards: Numbers = (
            np.random.Generator(np.random.PCG64(number))
            .permutation(len(index.shards))
            .astype(np.int64)
        )
        counts = np.array([shard.samples for shard in index.shards], np.int64)[self._shards]
        self._starts = [0, *np.cumsum(counts).tolist()]  # of the shards, in this order
        self._firsts = index.ends[self._shards] - counts  # the index of each one's first sample
        self._length = index.num_samples
        self._part = turn
        # samples of each lane in rounds in which every lane has a turn
        self._full = self._length // (turn * lanes) * turn
        self._cuts = [self._length * lane // lanes for lane in range(lanes + 1)]
        rests = [self._cuts[lane + 1] - self._cuts[lane] - self._full for lane in range(lanes)]
        self._rests = [0, *itertools.accumulate(rests)]
        self._held: OrderedDict[tuple[int, int], tuple[int, Numbers]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._length))]
        if not 0 <= place < self._length:
            raise IndexError(place)
        if place < self._full * self._lanes:
            turn, within = divmod(place, self._part)
            at = turn // self._lanes * self._part + within
            lane = turn % self._lanes
        else:  # what is left of each lane, one after the other
            rest = place - self._full * self._lanes
            lane = bisect.bisect_right(self._rests, rest) - 1
            at = self._full + rest - self._rests[lane]
        return self._sample(lane, self._cuts[lane] + at)

    def _sample(self, lane: int, at: int) -> int:
        """Return the sample at a place of all shards one after the other,
        once its window is shuffled.
        """
        first_shard = self._shard_at(self._cuts[lane])
        window = (self._shard_at(at) - first_shard) // self._window
        start, shuffled = self._held.get((lane, window)) or self._shuffle(lane, window, first_shard)
        return int(shuffled[at - start])

    def _shard_at(self, at: int) -> int:
        return bisect.bisect_right(self._starts, at) - 1

    def _shuffle(self, lane: int, window: int, first_shard: int) -> tuple[int, Numbers]:
        low = first_shard + window * self._window
        high = min(low + self._window, len(self._shards))
        start = max(self._cuts[lane], self._starts[low])
        stop = min(self._cuts[lane + 1], self._starts[high])
        samples = np.concatenate([self._range(shard, start, stop) for shard in range(low, high)])
        generator = np.random.Generator(np.random.PCG64(mix(self._number, lane, window)))
        shuffled = self._held[lane, window] = start, generator.permutation(samples)
        while len(self._held) > 2 * self._lanes:
            self._held.popitem(last=False)
        if self._ahead is not None:
            last = self._shard_at(self._cuts[lane + 1] - 1) + 1
            self._ahead(self._shards[low : min(high + self._window, last)].tolist())
        return shuffled

    def _range(self, shard: int, start: int, stop: int) -> Numbers:
        low = max(start, self._starts[shard])
        high = min(stop, self._starts[shard + 1])
        first = int(self._firsts[shard]) - self._starts[shard]
        return np.arange(first + low, first + max(low, high), dtype=np.int64)


class ShardOrder(Sampler[int]):
    """The sampler of a loader over a ShardDataset.

    Args:
        index: the shards.
        window: shards of a lane that are shuffled together: as many are read at a time, and as many
            are fetched ahead.
        lanes: parts of the order that are read beside each other. Ranks that divide them read their
            own lanes alone.
        turn: samples of a lane's turn: the microbatch of a rank; of no effect with one lane.
        ahead: receives the shards that a lane will soon read, as numbers.

    Raises:
        ConfigError: there are fewer shards than lanes.
    """

    def __init__(
        self,
        index: Index,
        window: int = 16,
        lanes: int = 1,
        turn: int = 1,
        ahead: Callable[[list[int]], object] | None = None,
    ) -> None:
        if lanes > len(index.shards):
            raise ConfigError(
                f"data.lanes is {lanes}, but there are {len(index.shards)} shards; it must be"
                f" {len(index.shards)} or less."
            )
        self.index = index
        self.window = min(window, len(index.shards))
        self.lanes = lanes
        self.turn = turn if lanes > 1 else 1
        self._ahead = ahead
        self._latest: tuple[tuple[int, int], WindowOrder] | None = None

    def __len__(self) -> int:
        return self.index.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.order_of(int(torch.randint(2**62, ())), 0))

    def order_of(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the order of an epoch; the loader asks for it, on each rank."""
        if self._latest is None or self._latest[0] != (seed, epoch):
            order = WindowOrder(
                self.index, mix(seed, epoch), self.window, self.lanes, self.turn, self._ahead
            )
            self._latest = (seed, epoch), order
        return self._latest[1]

    def describe(self, batch: int) -> str:
        """Return how well it shuffles: how many shards a batch's samples come from,
        beside a shuffle of all samples.
        """
        here = self.window * self.lanes
        all_of_them = len(self.index.shards)
        text = f"shuffle: {self.window} of {all_of_them:,} shards at a time" + (
            f" in each of {self.lanes} lanes" * (self.lanes > 1)
        )
        if here >= all_of_them:
            return text + ", which is all of them: as good as a shuffle of all samples"
        often = all_of_them / here
        text += (
            f"; a batch of {batch:,} has samples of {_different(batch, here):.0f} shards (a shuffle"
            f" of all samples: {_different(batch, all_of_them):.0f}), and two of its samples are of"
            f" one shard {often:.1f} times as often"
        )
        return text + self._of_classes(batch, here)

    def _of_classes(self, batch: int, here: int) -> str:
        """Return what the labels say: shards that were written class
        by class make batches of few classes.
        """
        counts = [shard.classes for shard in self.index.shards if shard.classes]
        sizes = [shard.samples for shard in self.index.shards if shard.classes]
        num_classes = max([len(self.index.classes), *counts]) if counts else 0
        if num_classes < 2 or not counts:
            return ""
        mean, size = sum(counts) / len(counts), sum(sizes) / len(sizes)
        best = _different(size, num_classes)
        if mean >= 0.5 * best:
            return ""
        return (
            f". Its shards are sorted: one holds {mean:.1f} classes, of {best:.0f} if they were"
            " mixed, so a batch has few classes (about"
            f" {_different(batch, min(num_classes, mean * here)):.0f}). Write them again (python -m"
            " trainkit data pack shuffles), or raise data.shuffle_shards"
        )


def _different(drawn: float, kinds: float) -> float:
    """Return how many of `kinds` equally likely kinds are expected among `drawn` draws."""
    return kinds * -math.expm1(drawn * math.log1p(-1 / kinds)) if kinds > 1 else 1.0
