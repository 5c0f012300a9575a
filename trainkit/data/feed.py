"""What the loop pulls: steps, each with this rank's microbatches on the device and their share of the step.

MapFeed       a data set of known length: all shares come from arithmetic (plan.py), without communication
StreamFeed    an iterable: each step the ranks agree, on the host, how many samples there are, and when all have ended
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.data.loader import ShardedLoader
from trainkit.data.transfer import count_samples

Move = Callable[[Any], Any]


@dataclass(frozen=True)
class Microbatch:
    """What one `training_step` gets.

    Attributes:
        batch: on the device.
        num_samples: samples in it.
        is_last: whether it is this rank's last of the step.
        places: its samples' places in the epoch's order; None for streams.
    """

    batch: Any
    num_samples: int
    is_last: bool
    places: range | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step's data.

    Attributes:
        num_samples: samples on all ranks.
        microbatches: this rank's, pulled one by one; consume them all. May be empty on some ranks.
    """

    num_samples: int
    microbatches: Iterator[Microbatch]


class Feed(ABC):
    """The steps of an epoch. `num_steps` is None where nobody can know."""

    num_steps: int | None

    @abstractmethod
    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps of `epoch` from step `start` on."""

    def close(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Let go of what loads."""


class MapFeed(Feed):
    """Steps of a data set of known length."""

    def __init__(self, loader: ShardedLoader, rank: int, move: Move) -> None:
        """Take the loader, this rank, and what moves a batch to the device."""
        self._loader, self._rank, self._move = loader, rank, move
        self.plan = loader.plan
        self.num_steps: int = self.plan.num_steps

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """See Feed."""
        batches = self._loader.iterate(epoch, start, self.num_steps)
        for step in range(start, self.num_steps):
            yield Step(self.plan.samples_in(step), self._microbatches(step, batches))

    def close(self) -> None:
        """See Feed."""
        self._loader.close()

    def _microbatches(self, step: int, batches: Iterator[Any]) -> Iterator[Microbatch]:
        shares = self.plan.microbatches(step, self._rank)
        for i, places in enumerate(shares, 1):
            yield Microbatch(self._move(next(batches)), len(places), i == len(shares), places)


class StreamFeed(Feed):
    """Steps of an iterable; each rank iterates its own, which the user has sharded where there are several."""

    def __init__(
        self,
        stream: Iterable[Any],
        length: int | None,
        accumulate: int,
        limit: int | None,
        sum_over_ranks: Callable[[int], int],
        move: Move,
    ) -> None:
        """Build the feed.

        Args:
            stream: yields microbatches; iterated anew each epoch.
            length: microbatches of the rank that has most of them, or None where nobody knows.
            accumulate: microbatches of a step on this rank.
            limit: microbatches of an epoch at most, or None.
            sum_over_ranks: sums a host number over ranks (a collective).
            move: moves a batch to the device.
        """
        self._stream, self._accumulate, self._limit = stream, accumulate, limit
        self._sum_over_ranks, self._move = sum_over_ranks, move
        if length is not None and limit is not None:
            length = min(length, limit)
        self.num_steps = None if length is None else -(-length // accumulate)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """See Feed. All ranks go on until the last of them has no data left."""
        batches = itertools.islice(iter(self._stream), self._limit)
        for _ in itertools.islice(batches, start * self._accumulate):
            pass
        while True:
            pulled = list(itertools.islice(batches, self._accumulate))
            sizes = [count_samples(batch) for batch in pulled]
            total = self._sum_over_ranks(sum(sizes))
            if total == 0:
                return
            yield Step(total, self._microbatches(pulled, sizes))

    def _microbatches(self, pulled: list[Any], sizes: list[int]) -> Iterator[Microbatch]:
        for i, (batch, size) in enumerate(zip(pulled, sizes, strict=True), 1):
            yield Microbatch(self._move(batch), size, i == len(pulled))
