"""The random numbers of a `collate_fn`: those of its batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from tests.helpers.toy import Line, quiet, rows
from trainkit.data.collate import seeded_collate


def mixed_up(samples: list[Any]) -> Any:
    """Return the batch with a share of its own reverse, as MixUp in a collate_fn does."""
    x, y = default_collate(samples)
    share = torch.rand(1) * np.random.rand() * random.random()  # noqa: NPY002 - the global one
    return x * share + x.flip(0) * (1 - share), y


class Rows(IterableDataset[Any]):
    """The rows as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(23))


class Seen(Line):
    """Remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train."""
        self.seen.append(batch[0])
        return super().training_step(batch, batch_idx)


def made(kind: str, num_workers: int) -> DataLoader[Any]:
    """Return a loader of a data set, of a stream, or of batches that are drawn."""
    options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": mixed_up}
    if kind == "stream":
        return DataLoader(Rows(), 4, **options)
    if kind == "batches":
        return DataLoader(rows(23), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7, 8]], **options)
    return DataLoader(rows(23), 4, shuffle=True, **options)


def inputs(folder: Path, data: DataLoader[Any], steps: int, **options: Any) -> list[Tensor]:
    """Return what a fit trains on."""
    task = Seen()
    quiet(folder, max_steps=steps, enable_checkpointing=True).fit(task, data, **options)
    return task.seen


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["data set", "stream", "batches"])
def test_a_run_resumed_in_an_epoch_draws_what_the_whole_one_did(
    kind: str, num_workers: int, tmp_path: Path
) -> None:
    """A worker that starts in the middle collates each batch as if it had made those before."""
    whole = inputs(tmp_path / "whole", made(kind, num_workers), 8)
    parts = inputs(tmp_path / "parts", made(kind, num_workers), 5)
    parts += inputs(tmp_path / "parts", made(kind, num_workers), 8, ckpt_path="last")
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))


@pytest.mark.parametrize("kind", ["data set", "stream", "batches"])
def test_the_number_of_workers_changes_no_batch(kind: str, tmp_path: Path) -> None:
    """With none, one or two the batches are the same; no two of a run have the same numbers."""
    runs = [inputs(tmp_path / str(count), made(kind, count), 8) for count in (0, 1, 2)]
    for other in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(runs[0], other, strict=True))
    assert len({tuple(x.reshape(-1).tolist()) for x in runs[0]}) == 8


def test_what_torch_collates_is_left_alone() -> None:
    """It draws nothing, and costs nothing."""
    assert seeded_collate(default_collate, None, 0) is default_collate
    assert seeded_collate(None, None, 0) is None
