"""Batches of any nesting: move them to a device, and count their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TaskError


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None, channels_last: bool = False) -> Any:
    """Return the batch with its tensors on `device`.

    Args:
        batch: tensors in tuples, named tuples, lists, dicts, or objects with a `to(device)` of their own.
        device: where to.
        dtype: floating point tensors are cast to it, where given.
        channels_last: tensors of 4 dimensions take that memory format.
    """
    if isinstance(batch, Tensor):
        cast = dtype if batch.is_floating_point() else None
        layout = torch.channels_last if channels_last and batch.dim() == 4 else torch.preserve_format
        return batch.to(device, dtype=cast, non_blocking=device.type != "cpu", memory_format=layout)
    if hasattr(batch, "to"):  # before the containers: a PackedSequence is a tuple, a BatchEncoding a mapping
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, dtype, channels_last) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device, dtype, channels_last) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(item, device, dtype, channels_last) for item in batch)
    return batch


def count_samples(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor found.

    Raises:
        TaskError: there is no tensor with a first dimension in the batch.
    """
    size = _first_length(batch)
    if size is None:
        raise TaskError(
            f"The number of samples of a batch of type {type(batch).__name__} cannot be seen: it holds no tensor. "
            "Return it from training_step: {'loss': loss, 'num_samples': n}."
        )
    return size


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() > 0 else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch:
            size = _first_length(item)
            if size is not None:
                return size
    return None
