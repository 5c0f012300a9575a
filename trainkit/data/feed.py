"""The loop's input: steps, each with this rank's microbatches on the device and their share of the
step.

MapFeed       a data set of known length: all shares come from arithmetic (plan.py), without communication
StreamFeed    an iterable: each step the ranks agree, on the host, on the number of samples and on the end
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trainkit.data.bad_samples import BadSample, BadSamples, rest_of
from trainkit.data.early import EarlyBatches, Fetching, Moved
from trainkit.data.loader import ShardedLoader, Source
from trainkit.data.plan import StepPlan
from trainkit.data.streams import Stream
from trainkit.device.transfer import count_samples
from trainkit.errors import DataError

Move = Callable[[Any], Any]
AccumulateAt = Callable[[int], int]  # microbatches of one rank in a step, by epoch


class Microbatch(NamedTuple):
    """The input of one `training_step`.

    Attributes:
        batch: on the device.
        num_samples: samples in it; 0 for a borrowed one (plan.py).
        is_last: whether it is this rank's last of the step.
        borrowed_follow: whether only borrowed batches follow it in the step.
        places: its samples' places in the epoch's order; None for streams.
        ends_batch: False for all pieces of a split batch but the last.
        skipped: the data set's indices of bad samples at these places, which are not in the batch.
    """

    batch: Any
    num_samples: int
    is_last: bool
    places: range | None = None
    ends_batch: bool = True
    skipped: tuple[int, ...] = ()
    borrowed_follow: bool = False

    @property
    def ends_step(self) -> bool:
        """Whether it is this rank's last one with samples, so that the update is next."""
        return self.num_samples > 0 and (self.is_last or self.borrowed_follow)


class Moving(Iterator[Microbatch]):
    """Microbatches that are moved to the device when they are pulled.

    Attributes:
        on_host: as they were loaded. Pull from here alone what is to be moved later.
        move: moves a batch.
    """

    def __init__(self, on_host: Iterator[Microbatch], move: Move) -> None:
        self.on_host = on_host
        self.move = move

    def __next__(self) -> Microbatch:
        """Return the next one, on the device."""
        own = next(self.on_host)
        batch = own.batch.batch if type(own.batch) is Moved else self.move(own.batch)
        return Microbatch(batch, *own[1:])  # _replace costs several times as much


class Step(NamedTuple):
    """One optimizer step's data.

    Attributes:
        num_samples: samples on all ranks.
        microbatches: this rank's, pulled one by one; consume them all. May be empty on some ranks.
    """

    num_samples: int
    microbatches: Iterator[Microbatch]


class Skips:
    """How a feed leaves out bad samples.

    Args:
        bad: of the stage.
        name: of the data, as "train_dataloaders".
        each_step: whether the ranks agree in each step, as training needs it; an evaluation's ranks
            do at its end.
    """

    def __init__(self, bad: BadSamples, name: str, each_step: bool) -> None:
        self._bad = bad
        self._name = name
        self._each_step = each_step
        self._own: list[BadSample] = []
        self._has_good = False

    def step(
        self, pulled: Sequence[tuple[Any, range | None]], move: Move, planned: int | None = None
    ) -> Step:
        """Return the step of this rank's guarded batches and their places; its number of samples is
        that of all ranks.

        Args:
            planned: samples of the step with the bad ones, if known: then one sum shows whether
                there are any.
        """
        microbatches = []
        lost = False
        for batch, places in pulled:
            rest = rest_of(batch)
            self._own += rest.bad
            if rest.batch is None:
                lost = True
                continue
            size = count_samples(rest.batch) if places is None else len(places) - len(rest.bad)
            skipped = tuple(bad.index for bad in rest.bad if bad.index is not None)
            microbatches.append(Microbatch(rest.batch, size, False, places, skipped=skipped))
        microbatches[-1:] = [microbatch._replace(is_last=True) for microbatch in microbatches[-1:]]
        total = sum(microbatch.num_samples for microbatch in microbatches)
        if self._each_step:
            total = self._bad.sum_over_ranks(total)
            self._has_good = self._has_good or total > 0
            if total < planned if planned is not None else self._bad.sum_over_ranks(len(self._own)):
                self._bad.share(self._name, self._own, lost)
                self._own.clear()
        else:
            self._bad.check(self._name, self._own)
        return Step(total, Moving(iter(microbatches), move))

    def end(self) -> None:
        """End a pass, on all ranks.

        Raises:
            DataError: training has not seen one good sample: the data or its transforms are at
                fault.
        """
        if not self._each_step:
            self._bad.share(self._name, self._own)
            self._own.clear()
        elif self._bad.last is not None and not self._has_good:
            raise DataError(
                f"{self._name}: none of its samples could be loaded; the last:"
                f" {self._bad.last.describe().rstrip('.')}. Check the data set and its transforms:"
                " python -m trainkit data check conf=NAME."
            )


class Feed(ABC):
    """The steps of an epoch.

    Attributes:
        name: of the loader among several of an evaluation, or "".
        fetching: the waits for batches that were fetched early.
    """

    name = ""

    def __init__(self) -> None:
        self.fetching = Fetching()

    @abstractmethod
    def num_steps_in(self, epoch: int) -> int | None:
        """Return the steps of an epoch, or None if unknown."""

    @abstractmethod
    def num_batches_in(self, epoch: int) -> int | None:
        """Return the microbatches of this rank in an epoch, or None if unknown."""

    @abstractmethod
    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps of `epoch` from step `start` on."""

    def indices(self, epoch: int, microbatch: Microbatch) -> list[int] | None:
        """Return the data set's indices of a microbatch's samples, or None if it has no indices."""
        return None

    def fetch_early(self) -> None:  # noqa: B027 - most feeds have no batch before its time
        """Fetch the next step's first batch and send it to the device, where that saves time:
        call it before the host waits for the device.
        """

    def close(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Release the loaders."""


class MapFeed(Feed):
    """Steps of a data set of known length."""

    def __init__(
        self,
        loader: ShardedLoader,
        rank: int,
        move: Move,
        accumulate_at: AccumulateAt | None = None,
        skips: Skips | None = None,
        fetches_early: bool = False,
    ) -> None:
        """Build the feed.

        Args:
            move: moves a batch to the device.
            accumulate_at: is needed if the accumulation changes between epochs.
            skips: how bad samples are skipped; None if they raise.
            fetches_early: whether `fetch_early` fetches a batch; not with `skips`.
        """
        super().__init__()
        self._loader = loader
        self._rank = rank
        self._move = move
        self._accumulate_at = accumulate_at
        self._skips = skips
        self._fetches_early = fetches_early
        # weak: the workers end with the iteration
        self._early: weakref.ref[EarlyBatches] | None = None

    @property
    def source(self) -> Source:
        """The data set and how it is loaded."""
        return self._loader.source

    def plan_of(self, epoch: int) -> StepPlan:
        """Return how the samples of an epoch are split over ranks."""
        plan = self._loader.plan
        return (
            plan
            if self._accumulate_at is None
            else replace(plan, accumulate=self._accumulate_at(epoch))
        )

    def num_steps_in(self, epoch: int) -> int:
        return self.plan_of(epoch).num_steps

    def num_batches_in(self, epoch: int) -> int:
        plan = self.plan_of(epoch)
        if (last := plan.num_steps - 1) < 0:
            return 0
        full, short = (len(plan.microbatches(step, self._rank)) for step in (0, last))
        return last * full + short

    def indices(self, epoch: int, microbatch: Microbatch) -> list[int] | None:
        if microbatch.places is None:
            return None
        indices = self._loader.indices(epoch, microbatch.places)
        return (
            [index for index in indices if index not in microbatch.skipped]
            if microbatch.skipped
            else indices
        )

    def first_sample(self) -> Any:
        """Return the data set's first sample as a batch, on the device."""
        return self._move(self._loader.first_sample())

    def set_shares(self, shares: tuple[int, ...] | None) -> None:
        """Split the samples of all steps from the next one on in these shares (None: even ones),
        also within an epoch.

        Call it on all ranks at the same step. Batches that workers have loaded ahead are dropped.
        """
        self._loader.plan = replace(self._loader.plan, shares=shares)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        plan = self.plan_of(epoch)
        batches = self._iterate(plan, epoch, start)
        for step in range(start, plan.num_steps):
            if plan.shares != self._loader.plan.shares:
                plan = self.plan_of(epoch)
                del batches  # first: its workers end
                batches = self._iterate(plan, epoch, step)
            shares = plan.microbatches(step, self._rank)
            if self._skips is None:
                own = self._microbatches(shares, batches)
                yield Step(plan.samples_in(step), Moving(own, self._move))
            else:
                pulled = list(zip(itertools.islice(batches, len(shares)), shares, strict=True))
                yield self._skips.step(pulled, self._move, plan.samples_in(step))
        if self._skips is not None:
            self._skips.end()

    def _iterate(self, plan: StepPlan, epoch: int, start: int) -> Iterator[Any]:
        batches = self._loader.iterate(plan, epoch, start)
        if not self._fetches_early:
            return batches
        early = EarlyBatches(batches, self._move, self.fetching)
        self._early = weakref.ref(early)
        return early

    def fetch_early(self) -> None:
        early = None if self._early is None else self._early()
        if early is not None:
            early.fetch()

    def close(self) -> None:
        self._loader.close()

    def _microbatches(self, shares: list[range], batches: Iterator[Any]) -> Iterator[Microbatch]:
        own = sum(1 for places in shares if places)
        for i, places in enumerate(shares, 1):
            yield Microbatch(
                next(batches),
                len(places),
                i == len(shares),
                places or None,
                borrowed_follow=i == own < len(shares),
            )


class StreamFeed(Feed):
    """Steps of a stream.

    Attributes:
        repeats: whether each epoch reads the batches of the first.
    """

    repeats = False

    def __init__(
        self,
        stream: Stream,
        accumulate_at: AccumulateAt,
        sum_over_ranks: Callable[[int], int],
        move: Move,
        skips: Skips | None = None,
        even: bool = False,
    ) -> None:
        """Build the feed.

        Args:
            stream: as this rank reads it.
            accumulate_at: microbatches of one declared rank in a step, by epoch.
            sum_over_ranks: sums a host number over ranks (a collective).
            move: moves a batch to the device.
            skips: how bad samples are skipped; None if they raise.
            even: whether all ranks need as many microbatches in each step: a rank without data
                repeats its last one, as a borrowed one (plan.py).
        """
        super().__init__()
        self.stream = stream
        self._accumulate_at = accumulate_at
        self._skips = skips
        self._sum_over_ranks = sum_over_ranks
        self._move = move
        self._even = even
        self._latest: Any = None

    def num_steps_in(self, epoch: int) -> int | None:
        return self.stream.num_steps(self._accumulate_at(epoch))

    def num_batches_in(self, epoch: int) -> int | None:
        steps = self.num_steps_in(epoch)
        return None if steps is None else steps * self.microbatches_in(epoch)

    def microbatches_in(self, epoch: int) -> int:
        """Return the microbatches of a step on this rank."""
        return self.stream.per_step(self._accumulate_at(epoch))

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """All ranks continue until the last of them has no data left."""
        for pulled in self.stream.steps(
            0 if self.repeats else epoch, start, self._accumulate_at(epoch)
        ):
            if self._skips is not None:
                step = self._skips.step([(batch, None) for batch in pulled], self._move)
                if self._sum_over_ranks(len(pulled)) == 0:
                    self._skips.end()
                    return
                yield step
                continue
            sizes = [count_samples(batch) for batch in pulled]
            total = self._sum_over_ranks(sum(sizes))
            if total == 0:
                return
            own = len(pulled)
            if self._even:
                pulled = self._with_borrowed(pulled, self.microbatches_in(epoch))
                sizes += [0] * (len(pulled) - len(sizes))
            yield Step(total, Moving(self._microbatches(pulled, sizes, own), self._move))

    def _microbatches(self, pulled: list[Any], sizes: list[int], own: int) -> Iterator[Microbatch]:
        for i, (batch, size) in enumerate(zip(pulled, sizes, strict=True), 1):
            yield Microbatch(batch, size, i == len(pulled), borrowed_follow=i == own < len(pulled))

    def _with_borrowed(self, pulled: list[Any], count: int) -> list[Any]:
        self._latest = pulled[-1] if pulled else self._latest
        if self._latest is None:
            raise DataError(
                "A rank's stream is empty. With engine=fsdp each rank needs one batch at least:"
                " start fewer ranks."
            )
        return [*pulled, *[self._latest] * (count - len(pulled))]

    def close(self) -> None:
        self.stream.close()
