"""The loop's input: steps, each with this rank's microbatches on the device and their share of the step.

MapFeed       a data set of known length: all shares come from arithmetic (plan.py), without communication
StreamFeed    an iterable: each step the ranks agree, on the host, on the number of samples and on the end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trainkit.data.loader import ShardedLoader, Source
from trainkit.data.plan import StepPlan
from trainkit.data.streams import Stream
from trainkit.device.transfer import count_samples

Move = Callable[[Any], Any]
AccumulateAt = Callable[[int], int]  # microbatches of one rank in a step, by epoch


class Microbatch(NamedTuple):
    """The input of one `training_step`.

    Attributes:
        batch: on the device.
        num_samples: samples in it.
        is_last: whether it is this rank's last of the step.
        places: its samples' places in the epoch's order; None for streams.
        ends_batch: False for all pieces of a split batch but the last.
    """

    batch: Any
    num_samples: int
    is_last: bool
    places: range | None = None
    ends_batch: bool = True


class Step(NamedTuple):
    """One optimizer step's data.

    Attributes:
        num_samples: samples on all ranks.
        microbatches: this rank's, pulled one by one; consume them all. May be empty on some ranks.
    """

    num_samples: int
    microbatches: Iterator[Microbatch]


class Feed(ABC):
    """The steps of an epoch.

    Attributes:
        name: of the loader among several of an evaluation, or "".
    """

    name = ""

    @abstractmethod
    def num_steps_in(self, epoch: int) -> int | None:
        """Return the steps of an epoch, or None if unknown."""

    @abstractmethod
    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps of `epoch` from step `start` on."""

    def indices(self, epoch: int, microbatch: Microbatch) -> list[int] | None:
        """Return the data set's indices of a microbatch's samples, or None if it has no indices."""
        return None

    def close(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Release the loaders."""


class MapFeed(Feed):
    """Steps of a data set of known length."""

    def __init__(self, loader: ShardedLoader, rank: int, move: Move, accumulate_at: AccumulateAt | None = None) -> None:
        """`move` moves a batch to the device; `accumulate_at` is needed if the accumulation changes between epochs."""
        self._loader, self._rank, self._move, self._accumulate_at = loader, rank, move, accumulate_at

    @property
    def source(self) -> Source:
        """The data set and how it is loaded."""
        return self._loader.source

    def plan_of(self, epoch: int) -> StepPlan:
        """Return how the samples of an epoch are split over ranks."""
        plan = self._loader.plan
        return plan if self._accumulate_at is None else replace(plan, accumulate=self._accumulate_at(epoch))

    def num_steps_in(self, epoch: int) -> int:
        return self.plan_of(epoch).num_steps

    def indices(self, epoch: int, microbatch: Microbatch) -> list[int] | None:
        return None if microbatch.places is None else self._loader.indices(epoch, microbatch.places)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        plan = self.plan_of(epoch)
        batches = self._loader.iterate(plan, epoch, start)
        for step in range(start, plan.num_steps):
            yield Step(plan.samples_in(step), self._microbatches(plan.microbatches(step, self._rank), batches))

    def close(self) -> None:
        self._loader.close()

    def _microbatches(self, shares: list[range], batches: Iterator[Any]) -> Iterator[Microbatch]:
        for i, places in enumerate(shares, 1):
            yield Microbatch(self._move(next(batches)), len(places), i == len(shares), places)


class StreamFeed(Feed):
    """Steps of a stream."""

    def __init__(self, stream: Stream, accumulate_at: AccumulateAt, sum_over_ranks: Callable[[int], int], move: Move) -> None:
        """Build the feed.

        Args:
            stream: as this rank reads it.
            accumulate_at: microbatches of one declared rank in a step, by epoch.
            sum_over_ranks: sums a host number over ranks (a collective).
            move: moves a batch to the device.
        """
        self.stream, self._accumulate_at = stream, accumulate_at
        self._sum_over_ranks, self._move = sum_over_ranks, move

    def num_steps_in(self, epoch: int) -> int | None:
        return self.stream.num_steps(self._accumulate_at(epoch))

    def microbatches_in(self, epoch: int) -> int:
        """Return the microbatches of a step on this rank."""
        return self.stream.per_step(self._accumulate_at(epoch))

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """All ranks continue until the last of them has no data left."""
        for pulled in self.stream.steps(epoch, start, self._accumulate_at(epoch)):
            sizes = [count_samples(batch) for batch in pulled]
            total = self._sum_over_ranks(sum(sizes))
            if total == 0:
                return
            last = [False] * (len(pulled) - 1) + [True] * bool(pulled)
            yield Step(total, map(Microbatch, map(self._move, pulled), sizes, last))

    def close(self) -> None:
        self.stream.close()
