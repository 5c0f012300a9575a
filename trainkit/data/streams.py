"""Streams: data without index or length (IterableDataset, lists of batches, any iterable), as one
rank reads them.

SplitStream    all ranks read the same stream, and each batch goes to one rank and one of its loader workers (the default)
OwnStream      each rank reads a part of its own: `trainkit.sharded(...)`, and WebDataset, which splits its shards by worker
StreamSource   data that something else reads and splits, such as a Ray Dataset; it makes its own Stream

Split, a stream gives the same batches in the same steps on any number of ranks and workers: step s
takes the next `accumulate x ranks` batches, of which every rank takes each world_size'th. A rank
reads the samples of the others too, and drops them before they are collated.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainkit.data.bad_samples import GuardedCollate, GuardedDataset
from trainkit.data.collate import seeded_collate
from trainkit.data.order import (
    OwnRandomNumbers,
    SeededDataset,
    copies_in,
    key_of,
    mix,
    own_numbers_of,
    set_epoch,
    whole_numbers,
)
from trainkit.data.splitting import DatasetShare, Share, loader_like
from trainkit.data.workers import named_errors, shield
from trainkit.errors import ConfigError

_ENDLESS = 1_000_000  # batches of an epoch without a limit
RandomNumbers = Callable[[], AbstractContextManager[None]]
OnMain = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Sharded:
    """Data of which each rank reads a part of its own; see `sharded`."""

    data: Any


_MOST_PADDED = 2  # samples that a part takes from another, to be as long
_ITERATORS = ("torch.utils.data.", "torchdata.stateful_dataloader.")


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class has an iterator of its own, which may change batches:
    a prefetcher, augmentation, a graph's.
    """
    methods = (getattr(type(loader), name) for name in ("__iter__", "_get_iterator"))
    return any(not method.__module__.startswith(_ITERATORS) for method in methods)


def has_indices(data: Any) -> bool:
    """Whether batches are made of the indices that a loader's samplers draw."""
    is_loader = isinstance(data, DataLoader) and not iterates_itself(data)
    return is_loader and not isinstance(data.dataset, IterableDataset)


def agreed(own: list[Any], agree: Callable[[list[Any]], list[Any]], sampler: Any) -> list[Any]:
    """Return rank 0's draws of a user's own sampler, whose order is split over ranks: indices, or
    lists of them.

    Raises:
        ConfigError: this rank's are of other samples.
    """
    drawn = agree(own)
    if own != drawn:
        mine, its = _members(own), _members(drawn)
        shared = len(mine & its)
        # batches may be a few that a rank has drawn by chance, but of the whole data set
        is_apart = shared <= _MOST_PADDED or all(isinstance(draw, int) for draw in own)
        if 2 * shared < len(mine) and is_apart:
            raise ConfigError(
                f"A {type(sampler).__name__} draws other samples on this rank than on rank 0, whose"
                " order is split over ranks: most would be left out. Give it the whole data set on"
                " all ranks, or declare trainkit.sharded(loader)."
            )
    return drawn


def _members(draws: list[Any]) -> set[int]:
    lists = (draw if isinstance(draw, list) else [draw] for draw in draws)
    return set(itertools.chain.from_iterable(lists))


def sharded(data: Any) -> Sharded:
    """Declare that each rank reads its own part of `data`: trainkit then splits nothing, and each
    rank trains on all it reads.

    A part is chosen by `trainkit.rank()` and `trainkit.world_size()`, which loader workers can call
    too.

    Args:
        data: a DataLoader or an iterable of batches.
    """
    return Sharded(data)


class Stream(ABC):
    """A stream as one rank reads it. `steps` may be called once for each epoch.

    Attributes:
        reading: who reads it, in the banner.
    """

    reading: ClassVar[str]
    _data: Any

    def __init__(self, seed: int) -> None:
        """`seed` is that of the random draws of this rank's pulls."""
        self._seed = seed
        self._loader: DataLoader[Any] | None = None  # its workers end with each epoch

    def steps(self, epoch: int, start: int, accumulate: int) -> Iterator[list[Any]]:
        """Yield this rank's batches of each step from step `start` on, without end: an empty list
        if none are left.

        Draws of random numbers depend on (seed, epoch, rank), so a run that resumes reads the same
        batches again.
        """
        self.close()  # persistent workers would continue the random numbers of the epoch before
        count, numbers = self.per_step(accumulate), self._numbers(epoch)

        def pull() -> list[Any]:
            return list(itertools.islice(batches, count))

        def pull_apart() -> list[Any]:
            with numbers():
                return pull()

        with own_numbers_of(_drawing(self._data), epoch):
            with numbers():
                batches = self._open(epoch, start, accumulate)
            # no step ahead: a stream may be filled by the training itself
            yield from iter(pull if numbers is nullcontext else pull_apart, None)

    def close(self) -> None:
        """End the loader's workers. Otherwise the interpreter would
        wait at its end for persistent ones.
        """
        if self._loader is not None:
            end_workers(self._loader)

    @abstractmethod
    def per_step(self, accumulate: int) -> int:
        """Return this rank's batches of a step with `accumulate`
        microbatches of each declared rank.
        """

    @abstractmethod
    def num_steps(self, accumulate: int) -> int | None:
        """Return the steps of an epoch, or None if unknown."""

    @abstractmethod
    def _open(self, epoch: int, start: int, accumulate: int) -> Iterator[Any]: ...

    def _numbers(self, epoch: int) -> RandomNumbers:
        return OwnRandomNumbers(mix(self._seed, epoch))


class StreamSource(ABC):
    """Data that something else reads and splits over the ranks; `fit` takes it in place of a
    DataLoader.

    Attributes:
        kind: what it is, after "the data is": "of Ray Data".
        batch_size: the microbatch of one rank.
    """

    kind: ClassVar[str]
    batch_size: int

    @abstractmethod
    def stream(
        self, limit: int | None, seed: int, ranks: tuple[int, int], declared: int, on_main: OnMain
    ) -> Stream:
        """Return the stream of this rank. Called on all ranks.

        Args:
            limit: batches of one declared rank in an epoch at most, or None.
            seed: of the run.
            ranks: (this rank, the number of ranks).
            declared: the number of ranks that accumulation and limit are meant for.
            on_main: runs a function on rank 0, and returns its result, or raises its error, on all
                ranks.
        """


class OwnStream(Stream):
    """A stream of which each rank reads its own part."""

    reading = "each rank reads its own part"

    def __init__(
        self, data: Any, length: int | None, limit: int | None, seed: int, share: float = 1.0
    ) -> None:
        """Build the stream.

        Args:
            data: yields this rank's batches; iterated once per epoch.
            length: batches of the rank that has most of them, or None if unknown.
            limit: batches of an epoch at most, or None.
            seed: this rank's.
            share: the declared ranks over the present ones: 1.5 if two of three are left. A step
                has the nearest whole number of batches.
        """
        super().__init__(seed)
        self._data, self._limit, self._share = shield(data), limit, share
        self._length = length if None in (length, limit) else min(length, limit)  # type: ignore[type-var]
        self._loader = data if isinstance(data, DataLoader) else None

    def per_step(self, accumulate: int) -> int:
        return max(1, round(accumulate * self._share))

    def num_steps(self, accumulate: int) -> int | None:
        return None if self._length is None else -(-self._length // self.per_step(accumulate))

    def _open(self, epoch: int, start: int, accumulate: int) -> Iterator[Any]:
        pass_epoch(self._data, epoch)
        batches = itertools.islice(iter(self._data), self._limit)
        for _ in itertools.islice(batches, int(start * accumulate * self._share)):
            pass
        return batches

    def _numbers(self, epoch: int) -> RandomNumbers:
        return nullcontext if type(self._data) in (list, tuple) else super()._numbers(epoch)


class SplitStream(Stream):
    """A stream that all ranks read, each taking its share of the batches of each step."""

    reading = "each rank reads all of it and takes its share of the batches"

    def __init__(
        self,
        data: Any,
        length: int | None,
        limit: int | None,
        seed: int,
        ranks: tuple[int, int],
        declared: int,
        agree: Any,
        guarded: bool = False,
    ) -> None:
        """Build the stream.

        Args:
            data: yields the batches of all ranks; iterated once per epoch.
            length: batches of an epoch, or None if unknown.
            limit: batches of one declared rank in an epoch at most, or None.
            seed: of the run.
            ranks: (this rank, the number of ranks).
            declared: the number of ranks that accumulation and limit are meant for.
            agree: returns rank 0's list on all ranks; used for the batches that a user's own batch
                sampler draws.
            guarded: whether a batch with bad samples is yielded as a Rest (bad_samples.py); of
                map-style data only.
        """
        super().__init__(mix(seed, ranks[0]))
        self._data = data
        self._run_seed = seed
        self._ranks = ranks
        self._declared = declared
        self._agree = agree
        self._guarded = guarded
        self._end = None if limit is None else limit * declared
        self._length = length if None in (length, self._end) else min(length, self._end)  # type: ignore[type-var]
        self._draws_batches = has_indices(data)
        is_loader = isinstance(data, DataLoader) and not iterates_itself(data)
        if is_loader and not self._draws_batches:
            own = self._own_samples = DatasetShare(
                data.dataset, data.batch_size or 1, data.num_workers
            )
            batches = {"batch_size": data.batch_size, "drop_last": data.drop_last}
            collate = seeded_collate(data.collate_fn, own, seed)
            self._loader = loader_like(data, own, collate_fn=collate, **batches)

    def per_step(self, accumulate: int) -> int:
        rank, size = self._ranks
        return len(range(rank, accumulate * self._declared, size))

    def num_steps(self, accumulate: int) -> int | None:
        return None if self._length is None else -(-self._length // (accumulate * self._declared))

    def _open(self, epoch: int, start: int, accumulate: int) -> Iterator[Any]:
        per_step = accumulate * self._declared
        share, data = Share(start * per_step, self._end, per_step, *self._ranks), self._data
        pass_epoch(data, epoch)
        if type(data) in (list, tuple):
            return (
                data[place]
                for place in range(len(data))[share.start : share.end]
                if share.has(place)
            )
        if self._draws_batches:
            return self._drawn(share, epoch)
        if self._loader is not None:
            self._own_samples.start(share, mix(self._run_seed, epoch))
            return named_errors(iter(self._loader))
        # pulled under the same random numbers on all ranks
        return (
            batch
            for place, batch in enumerate(itertools.islice(iter(data), share.end))
            if share.has(place)
        )

    def _drawn(self, share: Share, epoch: int) -> Iterator[Any]:
        """Return this rank's batches of the indices that rank 0 draws."""
        data = self._data
        batching = data.sampler if data.batch_sampler is None else data.batch_sampler
        with OwnRandomNumbers(mix(self._run_seed, epoch))():
            draws = list(itertools.islice(batching, share.end or _ENDLESS))
            if len(draws) == _ENDLESS:
                raise ConfigError(
                    f"A {type(batching).__name__} has drawn {_ENDLESS:,} batches, and does not end:"
                    " set trainer.limit_train_batches (or limit_val_batches, ...)."
                )
            own_draws = [
                whole_numbers([draw], batching)[0]  # a number, numpy's or torch's too
                if isinstance(draw, int) or getattr(draw, "ndim", 1) == 0
                else whole_numbers(draw, batching)
                for draw in draws
            ]
            drawn = agreed(own_draws, self._agree, batching)
        whole = data.batch_sampler is None  # the data set makes the batches
        lists = [[draw] for draw in drawn] if whole else drawn
        copies = iter(copies_in(itertools.chain.from_iterable(lists)))
        of_all = [[key_of(epoch, index, next(copies)) for index in each] for each in lists]
        batches = [keys for place, keys in enumerate(of_all) if share.has(place)]
        seeded = SeededDataset(data.dataset, self._run_seed)
        collate = seeded_collate(data.collate_fn, seeded, self._run_seed)
        # in this process, without a DataLoader's own cost
        if not (data.num_workers or data.pin_memory or self._guarded):
            samples = seeded.batches(iter(batches))
            return map(collate, (batch for (batch,) in samples) if whole else samples)
        dataset: Dataset[Any] = GuardedDataset(seeded) if self._guarded else seeded
        more: dict[str, Any] = {"collate_fn": GuardedCollate(collate) if self._guarded else collate}
        more |= (
            {"batch_size": None, "sampler": [key for (key,) in batches]}
            if whole
            else {"batch_sampler": batches}
        )
        self._loader = loader_like(data, dataset, **more)
        return named_errors(iter(self._loader))

    def _numbers(self, epoch: int) -> RandomNumbers:
        if type(self._data) in (list, tuple):
            return nullcontext
        if self._loader is None and not self._draws_batches:
            return OwnRandomNumbers(mix(self._run_seed, epoch))  # the stream itself is pulled here
        return super()._numbers(epoch)


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's persistent workers."""
    end = getattr(loader._iterator, "_shutdown_workers", None)
    if end is not None:
        end()
    loader._iterator = None


def pass_epoch(data: Any, epoch: int) -> None:
    """Pass the epoch to a loader's samplers, as a plain loop does, and to its data set; or to what
    yields the batches.
    """
    set_epoch(epoch, *_drawing(data), getattr(data, "dataset", None))


def _drawing(data: Any) -> list[Any]:
    """Return a loader and its samplers, and those of the loaders that it combines."""
    batching = getattr(data, "batch_sampler", None)
    inner = [getattr(of, "sampler", None) for of in (data, batching)]
    combined = getattr(batching, "combined_loaders", getattr(data, "combined_loaders", ()))
    return [data, batching, *inner, *(part for one in combined for part in _drawing(one))]
