"""Iterable data sets split over ranks and loader workers,
and the check that all ranks read the same stream.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from trainkit.data.order import OwnRandomNumbers, mix
from trainkit.data.workers import shield
from trainkit.errors import ConfigError

_COMPARED = 8  # samples of a worker's stream


@dataclass(frozen=True)
class Share:
    """The batches of a stream that one rank takes, from a place on.

    Attributes:
        start: batches of the stream before it.
        end: batches of the stream at most, or None.
        per_step: batches of a step, on all ranks.
        rank: this rank.
        world_size: the number of ranks.
    """

    start: int
    end: int | None
    per_step: int
    rank: int
    world_size: int

    def has(self, batch: int) -> bool:
        """Return whether the rank takes this batch; `batch` counts from the stream's beginning."""
        return batch >= self.start and batch % self.per_step % self.world_size == self.rank


class DatasetShare(IterableDataset[Any]):
    """The samples of an iterable data set that belong to one rank, and in a loader worker to this
    worker.

    The data set's own iteration sees no worker, so one that splits itself by worker is not split
    twice; and it draws its random numbers from (seed, epoch), the same on all ranks and workers.

    Attributes:
        first: the seed of the epoch, and the number of the batch that is read.
    """

    reads_users = True  # its `dataset`, which a worker_init_fn sees

    def __init__(self, dataset: IterableDataset[Any], batch_size: int, workers: int) -> None:
        """`batch_size` is the number of samples of a batch."""
        self.dataset = dataset
        self._batch_size = batch_size
        self._workers = workers
        self._share = Share(0, None, 1, 0, 1)
        self._seed = 0
        self.first = 0, 0

    def start(self, share: Share, seed: int) -> None:
        """Set the next iteration."""
        self._share = share
        self._seed = seed
        # of each worker's first samples; made for each epoch: a worker of the last may still run
        self._digests = torch.zeros(self._workers, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def _compare(self, worker: int, samples: Sequence[Any]) -> None:
        """Raise if another worker's stream begins with other samples than this one's."""
        self._digests[worker] = int(_digest(samples, noise=False)[:15], 16) + 1
        if len(set(self._digests.tolist()) - {0}) > 1:
            raise ConfigError(
                f"The loader workers read different streams of {type(self.dataset).__name__} (their"
                " first samples differ in whole numbers or texts), so its batches cannot be split"
                " over them. Draw its order"
                " from torch, numpy.random or random, which have the same seed in all workers, or"
                " from a fixed seed; or set num_workers=1. If each worker is to read a part of its"
                " own, pass trainkit.sharded(loader)."
            )

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        share = self._share
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = OwnRandomNumbers(self._seed)

        @contextmanager
        def numbers() -> Iterator[None]:
            with own(), as_worker(None):
                yield

        with numbers():
            samples = iter(self.dataset)
        turn = 0
        for batch in itertools.count():
            if batch == share.end:
                return
            with numbers():
                chunk = list(itertools.islice(samples, self._batch_size))
            if workers > 1 and not batch:
                self._compare(worker, chunk[:_COMPARED])
            if not chunk:
                return
            if share.has(batch):
                if turn % workers == worker:
                    self.first = self._seed, batch
                    yield from chunk
                turn += 1


@contextmanager
def as_worker(info: Any) -> Iterator[None]:
    """Within the context `torch.utils.data.get_worker_info()` returns this."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def loader_like(loader: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """Return a DataLoader with another data set and batches, and the options of `loader`."""
    return shield(DataLoader(dataset, **(options_of(loader) | changes)))  # type: ignore[no-any-return]


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's arguments, without data set and batches."""
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
    )
    options = {name: getattr(loader, name) for name in (*names, "persistent_workers")}
    if loader.num_workers > 0:
        options["prefetch_factor"] = loader.prefetch_factor
    return options


def fingerprint(data: Any, seed: int) -> str | None:
    """Return a digest of the first batch that a stream yields,
    or None if it cannot be read twice.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return None  # rank 0 draws the batches of all ranks
    if isinstance(data, DataLoader):
        data, count = data.dataset, data.batch_size or 1
    else:
        count = 1
    with OwnRandomNumbers(mix(seed, 0))(), as_worker(None):
        stream = iter(data)
        is_read_once = stream is data or iter(data) is stream
        return None if is_read_once else _digest(list(itertools.islice(stream, count)))


def held_by(dataset: Any, depth: int = 4) -> dict[str, str]:
    """Return a digest of what a data set has in memory, by attribute: of the first and the last
    entry of its arrays and lists. No sample is read: that may open files, which forks must not share.

    Args:
        dataset: or one that holds others, as Subset.
        depth: of those that are looked into; they may refer to each other.
    """
    held: dict[str, str] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(part, Dataset) for part in parts[:1]):  # one of Subset, ConcatDataset
            for part in parts if depth else ():
                inner = held_by(part, depth - 1)
                held |= {f"{name}.{key}": text for key, text in inner.items()}
        elif isinstance(value, (list, tuple, np.ndarray, torch.Tensor)):
            held[name] = _digest([_ends(value)])
        elif name == "_fingerprint":  # of Hugging Face's, of all that made it
            held[name] = str(value)
    return held


def _ends(value: Any) -> Any:
    """Return the first and the last entry of an array or list; of a path its name, since folders
    may be a host's own.
    """
    if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_meta):
        return type(value)
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value[[0, -1]] if value.ndim and len(value) > 2 else value
    if isinstance(value, (list, tuple)):
        return [_ends(value[place]) for place in ((0, -1) if value else ())]
    return os.path.basename(value) if isinstance(value, (str, os.PathLike)) else value


def _digest(samples: Sequence[Any], noise: bool = True) -> str:
    """Return a digest of samples; without `noise` their fractions, which an augmentation changes,
    do not count.
    """
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if not noise and _has_fractions(item):
            return
        if isinstance(item, torch.Tensor):
            try:
                add(item.detach().cpu().numpy())
            except (TypeError, RuntimeError):  # of a dtype or a layout that numpy lacks
                add(str(item))
        elif isinstance(item, np.ndarray) and not item.dtype.hasobject:
            digest.update(f"{item.dtype}{item.shape}".encode() + item.tobytes())
        elif isinstance(item, Mapping):
            add([part for pair in item.items() for part in pair])
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part)
        else:
            plain = isinstance(item, (bool, int, float, complex, str, bytes, np.generic))
            digest.update(repr(item if plain else type(item)).encode())

    add(samples)
    return digest.hexdigest()


def _has_fractions(item: Any) -> bool:
    kind = str(getattr(item, "dtype", type(item).__name__)).removeprefix("torch.")
    return kind.startswith(("float", "bfloat", "complex"))
