"""WebDataset: each rank reads shards of its own, chosen by its data set, and each loader worker of
them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from trainkit.data.splitting import as_worker, loader_like
from trainkit.data.streams import Sharded
from trainkit.engine.base import Engine


def read(data: Any, name: str, engine: Engine) -> Any:
    """Return a loader of a WebDataset as this rank reads it; other data, and declared parts, as they
    are.
    """
    if not isinstance(data, DataLoader):
        return data
    return Sharded(split_over_ranks(data, engine.ranks.data_rank, engine.ranks.data_size))


def split_over_ranks(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Return the loader of a data set that splits itself by worker, for the workers of one rank."""
    dataset: Any = loader.dataset
    part = SplitDataset(dataset, rank, world_size)
    return loader_like(loader, part, batch_size=loader.batch_size, drop_last=loader.drop_last)


class SplitDataset(IterableDataset[Any]):
    """A WebDataset, which splits its shards by loader worker,
    as if the workers of all ranks were those of one loader.
    """

    reads_users = True  # its `dataset`, which a worker_init_fn sees

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
        """Wrap `dataset` for a rank."""
        self.dataset = dataset
        self._rank = rank
        self._world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers, seed = (
            (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed)
        )
        all_workers = workers * self._world_size
        own = self._rank * workers + worker
        claimed = torch_worker.WorkerInfo(
            id=own, num_workers=all_workers, seed=seed, dataset=self.dataset
        )
        with as_worker(claimed), _as_only_rank():
            samples = iter(self.dataset)
        while True:
            with as_worker(claimed), _as_only_rank():
                chunk = list(itertools.islice(samples, 1))
            if not chunk:
                return
            yield chunk[0]


@contextmanager
def _as_only_rank() -> Iterator[None]:
    """Within the context the variables of torchrun, which WebDataset reads,
    are those of a single rank.
    """
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK="0", WORLD_SIZE="1")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
