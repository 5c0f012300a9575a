"""Checkpoints of small models, written without a run."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.find import read
from trainkit.checkpoint.format import Snapshot, find_aliases, load_weights
from trainkit.checkpoint.store import LocalStore, Store


def line(seed: int = 0) -> nn.Linear:
    """Return a small model."""
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def snapshot(model: nn.Module | None = None, training: Any = None, **about: Any) -> Snapshot:
    """Return the Snapshot of a model."""
    return Snapshot(*find_aliases((model or line()).state_dict()), training, {"epoch": 1} | about)


def store_of(tmp_path: Path) -> LocalStore:
    """Return the store of the checkpoints of the run `tmp_path/run`."""
    return LocalStore(tmp_path / "run" / "checkpoints")


def written(
    tmp_path: Path,
    name: str = "one",
    model: nn.Module | None = None,
    training: Any = None,
    **about: Any,
) -> Path:
    """Write a checkpoint and return its folder."""
    store_of(tmp_path).write(
        name, snapshot(model, {"step": 3} if training is None else training, **about)
    )
    return store_of(tmp_path).folder / name


def load(path: str, stores: Sequence[Store], model: nn.Module, resume: bool, **options: Any) -> Any:
    """Load a checkpoint's weights into a model; return its path and the state beside them, or None."""
    checkpoint = read(path, stores, resume, **options)
    if checkpoint is None:
        return None
    load_weights(Path(checkpoint.path), model, checkpoint.weights)
    return checkpoint.path, checkpoint.training


def fill(store: Store, *names: str) -> None:
    """Write checkpoints of these names, each with different weights."""
    for i, name in enumerate(names):
        store.write(name, snapshot(line(i), {"step": i}, global_step=i))


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Limit the size of files to a number of bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
