"""Predictions on disk: each rank writes a file for each of its batches.

A file's name begins with the place of its first sample, so the sorted names are the data set's
order on any number of ranks. A file appears as a whole or not at all; a killed run's files can be
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import DataError
from trainkit.run.prediction_table import clear_table
from trainkit.safety.untrusted import check_archive

_SUFFIX = ".pt"


def clear_predictions(folder: Path) -> None:
    """Create the folder, and remove an earlier run's predictions from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _files(folder):
        path.unlink()
    clear_table(folder)


def write_prediction(folder: Path, place: int, rank: int, outputs: Any) -> None:
    """Write the result of `predict_step` for a batch.

    Args:
        place: of the batch's first sample in the data set; for a stream, the batch's number on its
            rank.
    """
    path = folder / f"{place:012d}-{rank:05d}{_SUFFIX}"
    half = path.with_suffix(".tmp")
    torch.save(outputs, half)
    os.replace(half, path)


def read_predictions(folder: str | Path) -> Iterator[Any]:
    """Yield the result of `predict_step` for each batch, in the data set's order.

    Args:
        folder: a run's `predictions` folder.

    Raises:
        DataError: there is none in it.
        CheckpointError: a file is none that `predict` wrote: a link, or records that claim far more
            bytes than it has.
    """
    files = _files(Path(folder))
    if not files:
        raise DataError(
            f"{folder} holds no predictions. `python -m trainkit predict ... run_dir=RUN` writes"
            " RUN/predictions."
        )
    for path in files:
        check_archive(path)
        yield torch.load(path, weights_only=True, map_location="cpu")


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.glob(f"*{_SUFFIX}") if path.stem.replace("-", "").isdigit()
    )
