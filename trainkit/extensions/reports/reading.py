"""Reads every sample of the loaders once, in their workers, and finds those that raise:
`python -m trainkit data check`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainkit.data.bad_samples import BadSample, GuardedDataset, in_a_line
from trainkit.data.combined import CombinedLoader
from trainkit.data.order import SeededDataset
from trainkit.data.splitting import loader_like
from trainkit.data.workers import shield

_BATCH = 16  # samples that a worker reads before it reports


@dataclass(frozen=True)
class Reading:
    """The samples of one loader, to be read.

    Attributes:
        name: of the loader, as "train".
        data: the loader, a Dataset, or an iterable of batches.
        num_samples: samples; None for a stream.
        num_workers: processes that read.
    """

    name: str
    data: Any
    num_samples: int | None
    num_workers: int

    def read(self, seed: int) -> Iterator[tuple[int, list[BadSample]]]:
        """Yield (samples or batches read, the bad ones of them);
        samples are drawn as in the first epoch.
        """
        if self.num_samples is None:
            yield from _read_stream(self.data)
            return
        is_loader = isinstance(self.data, DataLoader)
        dataset = GuardedDataset(SeededDataset(self.data.dataset if is_loader else self.data, seed))
        keys = iter([(0, index) for index in range(self.num_samples)])
        batches = list(iter(lambda: list(itertools.islice(keys, _BATCH)), []))
        if is_loader and self.data.num_workers:  # its own workers, with their initialization
            loader = loader_like(
                self.data, dataset, batch_sampler=batches, collate_fn=_only_bad, pin_memory=False
            )
        else:
            loader = shield(
                DataLoader(
                    dataset,
                    num_workers=self.num_workers,
                    batch_sampler=batches,
                    collate_fn=_only_bad,
                )
            )
        yield from loader


def readings(loaders: Sequence[tuple[str, Any]], num_workers: int | None) -> list[Reading]:
    """Return what to read of named loaders; each data set once.

    Args:
        loaders: (name, a DataLoader, a Dataset, an iterable of batches, a list or dict of
            DataLoaders, or None).
        num_workers: processes for a loader that has none. Default: the cores of this process.
    """
    result = []
    seen = set()
    for name, data in loaders:
        data = data.iterables if isinstance(data, CombinedLoader) else data
        items = (
            data
            if isinstance(data, Mapping)
            else dict(enumerate(data))
            if isinstance(data, (list, tuple))
            else {}
        )
        several = bool(items) and all(
            isinstance(item, (DataLoader, Dataset)) for item in items.values()
        )
        for i, item in items.items() if several else [(0, data)]:
            dataset = item.dataset if isinstance(item, DataLoader) else item
            if item is None or id(dataset) in seen:
                continue
            seen.add(id(dataset))
            has_indices = isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)
            workers = (item.num_workers if isinstance(item, DataLoader) else 0) or num_workers
            workers = len(os.sched_getaffinity(0)) if workers is None else workers
            label = f"{name}[{i}]" if several else name
            result.append(Reading(label, item, len(dataset) if has_indices else None, workers))  # type: ignore[arg-type]
    return result


def _only_bad(samples: list[Any]) -> tuple[int, list[BadSample]]:
    return len(samples), [sample for sample in samples if isinstance(sample, BadSample)]


def _read_stream(data: Any) -> Iterator[tuple[int, list[BadSample]]]:
    """Read to the end, or to the first error: nothing can be read after it."""
    try:
        for _ in data:
            yield 1, []
    except Exception as error:  # any: see GuardedDataset
        yield 1, [BadSample(None, str(getattr(error, "filename", None) or ""), in_a_line(error))]
