"""From the user's data (DataLoader, Dataset, iterable) to
loaders that yield one rank's microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainkit.data.bad_samples import GuardedCollate, GuardedDataset
from trainkit.data.collate import seeded_collate
from trainkit.data.order import (
    DrawnOrder,
    Key,
    SeededDataset,
    epoch_order,
    indices_at,
    keys_at,
    mix,
    own_numbers_of,
    random_numbers_of,
    set_epoch,
    whole_numbers,
)
from trainkit.data.plan import StepPlan
from trainkit.data.splitting import loader_like, options_of
from trainkit.data.streams import Sharded, agreed, iterates_itself
from trainkit.data.workers import Shielded, named_errors, start_workers
from trainkit.errors import ConfigError, DataError
from trainkit.extension import advice


@runtime_checkable
class SeededOrder(Protocol):
    """A sampler that computes an epoch's order on each rank by itself,
    so that no rank sends a list of all samples.
    """

    def order_of(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the order of an epoch, the same on all ranks."""


@dataclass(frozen=True)
class Source:
    """A map-style data set and how its samples become microbatches.

    Attributes:
        dataset: has `__len__` and `__getitem__`.
        batch_size: the microbatch of one rank.
        shuffle: a new order each epoch.
        drop_last: leave out a short last step.
        sampler: the user's own sampler that draws the order (on rank 0), or None.
        options: the DataLoader's other arguments (workers, collate, pinning).
    """

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool
    drop_last: bool
    sampler: Iterable[int] | None
    options: dict[str, Any]

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self.sampler if self.sampler is not None else self.dataset)  # type: ignore[arg-type]


def read_source(data: Any, name: str, training: bool) -> Source | None:
    """Read the user's data; return None for an iterable of unknown order.

    Args:
        data: a DataLoader, a Dataset, or an iterable of batches.
        name: its name in errors, as "train_dataloaders".
        training: whether a bare Dataset is shuffled.

    Raises:
        ConfigError: it is none of these, or a DataLoader or another library's that already shards
            its samples over ranks, or that yields batches as they come.
        DataError: the data set is empty.
    """
    _refuse_several(data, name)
    if isinstance(data, Sharded):
        return None
    package = type(data).__module__.partition(".")[0]
    for base in type(data).__mro__:
        if text := advice("the data's class", f"{package} {base.__name__}"):
            raise ConfigError(f"{name}: {type(data).__name__} is {text.removeprefix('. ')}")
    if isinstance(data, DataLoader):
        if not getattr(data, "in_order", True):  # torchdata's has none in some versions
            raise ConfigError(
                f"{name} has in_order=False; batches come in the order of their steps here, so that"
                " a run repeats and resumes exactly. Leave it out."
            )
        source = _read_loader(data, name)
    elif (
        isinstance(data, Dataset)
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset)
    ):
        source = Source(data, 1, training, False, None, {})
    elif hasattr(data, "__iter__"):
        return None
    else:
        raise ConfigError(
            f"{name} is of type {type(data).__name__}; it must be a DataLoader, a Dataset or an"
            " iterable."
        )
    if source is not None and source.num_samples == 0:
        raise DataError(f"{name}: the data set has no samples.")
    return source


def items_of(data: Any, *kinds: type) -> list[Any]:
    """Return the items of a dict, list or tuple if all are of these kinds, else none."""
    if not isinstance(data, (Mapping, list, tuple)):
        return []
    items = [*data.values()] if isinstance(data, Mapping) else data
    places = range(len(items))  # a list of the user's own may read its batches as it is iterated
    whole = all(isinstance(items[place], kinds) for place in places)
    return [items[place] for place in places] if whole else []


def _refuse_several(data: Any, name: str) -> None:
    """Refuse a collection of loaders or data sets, which would be taken for a stream of batches."""
    items = items_of(data, DataLoader, Dataset)
    if items:
        raise ConfigError(
            f"{name} is a {type(data).__name__} of {type(items[0]).__name__}s. Give DataLoaders:"
            " training then takes a batch of each (see trainkit.CombinedLoader), evaluation one"
            " loader after the other. Or join data sets with torch.utils.data.ConcatDataset."
        )


def _is_stateful(kind: type) -> bool:
    return kind.__module__.startswith("torchdata.stateful_dataloader.")


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader draws batches of `batch_size` from its sampler, as DataLoader and
    torchdata's StatefulDataLoader do.

    A run resumes by its own count of steps; the state of a StatefulDataLoader is not used.
    """
    if iterates_itself(loader):
        return False
    if _is_stateful(type(loader)):
        return type(loader.batch_sampler).__name__ == "BatchSampler"
    return type(loader.batch_sampler) is BatchSampler


def _refuse_split(loader: DataLoader[Any], name: str) -> None:
    """Refuse samples that are split over ranks already, also by a loader with batches of its own."""
    batching: Any = loader.batch_sampler
    for sampler in (loader.sampler, batching, getattr(batching, "sampler", None)):
        if (getattr(sampler, "num_replicas", 0) or 0) > 1 or isinstance(
            sampler, DistributedSampler
        ):
            raise ConfigError(
                f"{name} has a {type(sampler).__name__}; trainkit shards the samples over ranks"
                " itself. Pass shuffle=True (or a sampler over the whole data set) in its place."
            )


def _read_loader(loader: DataLoader[Any], name: str) -> Source | None:
    _refuse_split(loader, name)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    if not _is_plain(loader):
        return None  # the user's own batches, of unknown sizes
    batching: Any = loader.batch_sampler  # the user's, or the DataLoader's own
    sampler: Any = batching.sampler
    # A subclass may draw differently: only torch's own two are known, and torchdata's.
    shuffles = (
        type(sampler).__name__ == "RandomSampler"
        if _is_stateful(type(sampler))
        else isinstance(sampler, RandomSampler)
    )
    own = (
        None
        if type(sampler) in (RandomSampler, SequentialSampler) or _is_stateful(type(sampler))
        else sampler
    )
    if own is not None and not hasattr(own, "__len__"):
        raise ConfigError(f"{name} has a {type(own).__name__} without a length; give it a __len__.")
    if own is None and (
        len(sampler) != len(loader.dataset)  # type: ignore[arg-type]
        or (shuffles and sampler.replacement)
    ):
        own = sampler  # of some samples only, or with replacement: use its own draws as the order
    options = options_of(loader)
    return Source(loader.dataset, batching.batch_size, shuffles, batching.drop_last, own, options)


class RankSampler(Sampler[list[Key]]):
    """Yields the microbatches of one rank as lists of keys, from any step of any epoch on.

    `start` is called before each iteration; the DataLoader and its workers persist over epochs.
    """

    def __init__(self, plan: StepPlan, rank: int, draw: Callable[[int], Sequence[int]]) -> None:
        """`draw` returns an epoch's order."""
        self.plan = plan
        self.rank = rank
        self.draw = draw
        self.epoch = 0
        self.step = 0
        self.last = plan.num_steps

    def start(self, plan: StepPlan, epoch: int, step: int) -> None:
        """Set the next iteration: step `step` and all after it of `epoch`, split by `plan`."""
        self.plan = plan
        self.epoch = epoch
        self.step = step
        self.last = plan.num_steps

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        order = self.draw(epoch)
        for step in range(self.step, self.last):
            for places in self.plan.microbatches(step, self.rank):
                reads = self.plan.reads(step, places)
                yield keys_at(epoch, order, reads, self.plan.num_samples)

    def __len__(self) -> int:
        return sum(
            len(self.plan.microbatches(step, self.rank)) for step in range(self.step, self.last)
        )


class ShardedLoader:
    """A source sharded over ranks: iterates the microbatches of
    one rank for some steps of an epoch.
    """

    def __init__(
        self,
        source: Source,
        plan: StepPlan,
        rank: int,
        seed: int,
        agree: Callable[[list[int]], list[int]],
        guarded: bool = False,
    ) -> None:
        """Build the loader.

        Args:
            plan: the arithmetic; its `num_samples` may be fewer than the source's
                (limit_*_batches).
            agree: returns rank 0's list on all ranks; used for the order of a user's own sampler.
            guarded: whether a batch with bad samples is yielded as a Rest (bad_samples.py).
        """
        self.source = source
        self.plan = plan
        self._seed = seed
        self._agree = agree
        self._drawn: list[int] | None = None
        self._sampler = RankSampler(plan, rank, self._order)
        options = dict(source.options)
        options["worker_init_fn"] = Shielded(options.get("worker_init_fn"))
        if options.get("generator") is None:
            # A DataLoader seeds its workers from here. By default it would draw from the global
            # random numbers, and the model's dropout would depend on how often data was loaded.
            options["generator"] = torch.Generator().manual_seed(mix(seed, rank))
        seeded = self._seeded = SeededDataset(source.dataset, seed)
        dataset: Dataset[Any] = seeded
        collate = options["collate_fn"] = seeded_collate(options.get("collate_fn"), seeded, seed)
        if guarded:
            dataset = GuardedDataset(seeded)
            options["collate_fn"] = GuardedCollate(collate)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._sampler, **options)

    def iterate(self, plan: StepPlan, epoch: int, start: int) -> Iterator[Any]:
        """Return an iterator over this rank's microbatches of `epoch` from step `start` on, split
        by `plan`.

        Without workers they are read as a DataLoader reads them, in this process, but without its
        own cost for a batch.
        """
        if self.source.sampler is not None and not isinstance(self.source.sampler, SeededOrder):
            # Here, not in the sampler: all ranks run this at the same time, and `agree` is a
            # collective.
            set_epoch(epoch, self.source.sampler)
            with (
                random_numbers_of(self._seed, epoch, -1),
                own_numbers_of([self.source.sampler], epoch),
            ):
                # a resumed run draws the same order
                draws = iter(self.source.sampler)
                own = list(itertools.islice(draws, plan.num_samples))
                next(draws, None)  # what a sampler does after its last one, as counting epochs
            own = whole_numbers(own, self.source.sampler)
            self._drawn = self._checked(agreed(own, self._agree, self.source.sampler), plan)
        self._sampler.start(plan, epoch, start)
        if (
            self._loader.num_workers
            or self._loader.pin_memory
            or self._seeded is not self._loader.dataset
        ):
            return named_errors(start_workers(self._loader))
        return map(self._loader.collate_fn, self._seeded.batches(iter(self._sampler)))

    def _checked(self, drawn: list[int], plan: StepPlan) -> list[int]:
        """Return rank 0's draws; samples that come again have random numbers of their own.

        Raises:
            DataError: they are fewer than the sampler's length, by which steps are planned.
        """
        if len(drawn) < plan.num_samples:
            raise DataError(
                f"A {type(self.source.sampler).__name__} has drawn {len(drawn)} indices, and its"
                f" length promised {plan.num_samples} or more, from which the steps of an epoch are"
                " planned. Let its __len__ return how many it draws."
            )
        return drawn if len({*drawn}) == len(drawn) else DrawnOrder(drawn)

    def first_sample(self) -> Any:
        """Return a batch of the data set's first sample alone. With workers it is one's: a file that
        a data set opens here would be shared by all of them.
        """
        loader = loader_like(
            self._loader,
            self._seeded,
            batch_sampler=[[(0, 0)]],
            collate_fn=self.source.options.get("collate_fn"),
            generator=torch.Generator(),
            num_workers=min(1, self._loader.num_workers),
            persistent_workers=False,
        )
        return next(start_workers(loader))

    def close(self) -> None:
        """End the workers; nothing can be iterated afterwards."""
        # Deleted here: a DataLoader that the garbage collector finds in a cycle waits five seconds
        # for each worker.
        del self._loader

    def indices(self, epoch: int, places: range) -> list[int]:
        """Return the data set's indices of the samples at these places of the epoch's order."""
        return indices_at(self._order(epoch), places, self.plan.num_samples)

    def _order(self, epoch: int) -> Sequence[int]:
        if isinstance(self.source.sampler, SeededOrder):
            return self.source.sampler.order_of(self._seed, epoch)
        return epoch_order(
            self.source.num_samples, self.source.shuffle, self._seed, epoch, self._drawn
        )
