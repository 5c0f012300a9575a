"""CombinedLoader: several loaders as one, each batch made of a batch of each.

Of DataLoaders over map-style data sets it makes one DataLoader over all their samples, with batches
of indices: so only the rank that trains on a combined batch loads it, and the order follows the
run's seed. With a stream among them, the loaders are iterated side by side.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch.utils.data import ConcatDataset, DataLoader, get_worker_info

from trainkit.data.loader import items_of, read_source
from trainkit.data.order import set_epoch, whole_numbers
from trainkit.data.streams import end_workers, has_indices, pass_epoch
from trainkit.data.workers import Shielded
from trainkit.errors import ConfigError, DataError

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
_END = object()


class CombinedLoader:
    """Several loaders as one, as Lightning's. Returned by `train_dataloader`, or passed to
    `Trainer.fit`.

    A combined batch is one batch for the counts: it weighs in its step by the samples of its first
    loader's batch, unless the Task has a `batch_weight`.

    Args:
        iterables: DataLoaders or iterables of batches, in a dict or a list; a batch is then a dict
            or a list of theirs.
        mode: "min_size" ends with the shortest; "max_size_cycle" with the longest, and shorter ones
            begin again; "max_size" with the longest, and None is the batch of one that has ended;
            "sequential" yields each loader's batches by themselves, one loader after the other.

    Attributes:
        combined_loaders: the loaders, in a list.

    Raises:
        ConfigError: there are no loaders, or the mode is another.
    """

    def __init__(
        self, iterables: Mapping[str, Any] | Sequence[Any], mode: Mode = "min_size"
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(
                f"CombinedLoader: mode is '{mode}'; it must be one of {', '.join(get_args(Mode))}."
            )
        if not isinstance(iterables, (Mapping, list, tuple)) or not iterables:
            raise ConfigError("CombinedLoader: iterables must be a dict or a list of loaders.")
        self.iterables = iterables
        self.mode = mode
        self.combined_loaders = list(
            iterables.values() if isinstance(iterables, Mapping) else iterables
        )

    def __iter__(self) -> Iterator[Any]:
        rows = (
            _in_turn(self.combined_loaders)
            if self.mode == "sequential"
            else _together(self.combined_loaders, self.mode)
        )
        return (self._arranged(row) for row in rows)

    def __len__(self) -> int:
        return _length([len(part) for part in self.combined_loaders], self.mode)

    def set_epoch(self, epoch: int) -> None:
        """Pass it to the loaders' samplers and data sets. Persistent workers end: they would have
        the epoch before, and continue its random numbers.
        """
        for part in self.combined_loaders:
            pass_epoch(part, epoch)
            if isinstance(part, DataLoader):
                end_workers(part)

    def joined(self, name: str) -> Any:
        """Return one DataLoader of all samples, or this iterable if one of the loaders is a stream.

        Args:
            name: of the data in errors, as "train_dataloaders".
        """
        for part in self.combined_loaders:
            read_source(part, name, training=True)  # refuses what cannot be split
        if not all(_has_batches_of_indices(part) for part in self.combined_loaders):
            return self
        dataset = _Samples([part.dataset for part in self.combined_loaders])
        collate = _Collate([part.collate_fn for part in self.combined_loaders], self._arranged)
        batches: Any = _Batches(self.combined_loaders, [0, *dataset.cumulative_sizes], self.mode)
        return DataLoader(
            dataset, batch_sampler=batches, collate_fn=collate, **_options_of(self.combined_loaders)
        )

    def _arranged(self, row: Sequence[Any]) -> Any:
        if self.mode == "sequential":
            return next(item for item in row if item is not None)
        return (
            dict(zip(self.iterables, row, strict=True))
            if isinstance(self.iterables, Mapping)
            else list(row)
        )


def joined(data: Any, name: str) -> Any:
    """Return training data as one loader:
    a CombinedLoader, or a dict or list of DataLoaders, as one in "max_size_cycle".
    """
    if isinstance(data, CombinedLoader):
        return data.joined(name)
    if items_of(data, DataLoader):
        return CombinedLoader(data, "max_size_cycle").joined(name)
    return data


def _has_batches_of_indices(data: Any) -> bool:
    return has_indices(data) and data.batch_sampler is not None


def _length(lengths: Sequence[int], mode: Mode) -> int:
    return (
        sum(lengths)
        if mode == "sequential"
        else min(lengths)
        if mode == "min_size"
        else max(lengths)
    )


def _together(parts: Sequence[Iterable[Any]], mode: Mode) -> Iterator[list[Any]]:
    """Yield rows of one item of each part."""
    iterators, ended = [iter(part) for part in parts], [False] * len(parts)
    while True:
        row = []
        for place, part in enumerate(parts):
            item = next(iterators[place], _END)
            if item is _END:
                ended[place] = True
                if mode == "min_size" or all(ended):
                    return
                item = None
                if mode == "max_size_cycle":
                    iterators[place] = iter(part)
                    item = next(iterators[place], _END)
            if item is _END:
                raise DataError(
                    f"CombinedLoader: loader {place} yields no batch when it is iterated again."
                )
            row.append(item)
        yield row


def _in_turn(parts: Sequence[Iterable[Any]]) -> Iterator[list[Any]]:
    """Yield rows of which one item is not None."""
    for place, part in enumerate(parts):
        for item in part:
            yield [item if at == place else None for at in range(len(parts))]


class _Batches:
    """A batch sampler over the samples of all loaders."""

    def __init__(
        self, loaders: Sequence[DataLoader[Any]], offsets: Sequence[int], mode: Mode
    ) -> None:
        self.combined_loaders = loaders
        self._batching: list[Any] = [loader.batch_sampler for loader in loaders]
        self._offsets = offsets
        self._mode = mode

    def __iter__(self) -> Iterator[list[int]]:
        rows = (
            _in_turn(self._batching)
            if self._mode == "sequential"
            else _together(self._batching, self._mode)
        )
        for row in rows:
            yield [
                offset + index
                for batch, offset, batching in zip(row, self._offsets, self._batching, strict=False)
                for index in whole_numbers(() if batch is None else batch, batching)
            ]

    def __len__(self) -> int:
        return _length([len(batching) for batching in self._batching], self._mode)


class _Samples(ConcatDataset[Any]):
    """The samples of all data sets, each with the number of its data set."""

    def set_epoch(self, epoch: int) -> None:
        """Pass it to the data sets."""
        set_epoch(epoch, *self.datasets)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return bisect.bisect_right(self.cumulative_sizes, index), super().__getitem__(index)  # type: ignore[no-untyped-call]


class _Collate:
    """Makes the batch of each loader with its own collate_fn, and combines them."""

    def __init__(
        self, own: Sequence[Callable[[list[Any]], Any]], arrange: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._own = own
        self._arrange = arrange

    def __call__(self, samples: Sequence[tuple[int, Any]]) -> Any:
        parts: list[list[Any]] = [[] for _ in self._own]
        for place, sample in samples:
            parts[place].append(sample)
        return self._arrange(
            [own(part) if part else None for own, part in zip(self._own, parts, strict=True)]
        )


class _InitAll:
    """Calls the worker_init_fn of each loader, which sees its loader's data set."""

    def __init__(self, own: Mapping[int, Callable[[int], None]]) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        whole = info.dataset
        for place, init in self._own.items():
            object.__setattr__(info, "dataset", whole.datasets[place])
            init(worker)
        object.__setattr__(info, "dataset", whole)


def _options_of(loaders: Sequence[DataLoader[Any]]) -> dict[str, Any]:
    """Return the options of a loader that stands for all: the workers of all together."""
    inits = {
        place: init
        for place, loader in enumerate(loaders)
        if (init := loader.worker_init_fn) is not None and not isinstance(init, Shielded)
    }
    workers = sum(loader.num_workers for loader in loaders)
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": any(loader.pin_memory for loader in loaders),
        "timeout": max(loader.timeout for loader in loaders),
        "worker_init_fn": _InitAll(inits) if inits else None,
        "multiprocessing_context": next(
            filter(None, (loader.multiprocessing_context for loader in loaders)), None
        ),
    }
    if workers:
        options["persistent_workers"] = any(loader.persistent_workers for loader in loaders)
        options["prefetch_factor"] = max(loader.prefetch_factor or 2 for loader in loaders)
    return options
