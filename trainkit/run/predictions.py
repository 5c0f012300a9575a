"""Predictions on disk: each rank writes a file for each of its batches.

A file's name begins with the place of its first sample, so the sorted names are the data set's
order on any number of ranks. A file appears as a whole or not at all; a killed run's files can be
read.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.checkpoint.format import load_plain
from trainkit.errors import DataError, TaskError
from trainkit.run.prediction_table import clear_table

_SUFFIX = ".pt"
_NAME = re.compile(r"\d{12}-\d{5}")


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
    torch.save(_plain(outputs), half)
    os.replace(half, path)


def _plain(value: Any) -> Any:
    """Return outputs as tensors and plain values, which are read without running code: arrays as
    tensors; mappings, dataclasses and named tuples as dicts.

    Raises:
        TaskError: they hold something else.
    """
    if isinstance(value, Tensor):
        return value.as_subclass(Tensor)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    raise TaskError(
        f"predict_step returns a {type(value).__name__}, and predictions on disk are tensors and"
        " plain values, which are read without running code. Return tensors, arrays, numbers, texts,"
        " or dicts and lists of them."
    )


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
        yield load_plain(path)


def _files(folder: Path) -> list[Path]:
    """Return what `write_prediction` has written, and no tensors of others."""
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if _NAME.fullmatch(path.stem))
