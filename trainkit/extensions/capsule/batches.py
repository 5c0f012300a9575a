"""Batches as tensors and plain values, and back: a reader rebuilds them without running code.

Each value is a tuple that begins with its kind. Named tuples are rebuilt with their fields and
another class; an object of any other class is not saved, only its class name.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainkit.errors import CheckpointError

_PLAIN = {type(None), bool, int, float, complex, str, bytes}


def pack(value: Any) -> tuple[Any, ...]:
    """Return a copy of a batch on the host, of tensors and plain values. Waits for the device."""
    if isinstance(value, Tensor):
        return ("tensor", value.detach().cpu().clone())
    if type(value) in _PLAIN:
        return ("value", value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return ("array", torch.from_numpy(value.copy()))
    if isinstance(value, Mapping):
        return (
            "mapping",
            [(key if type(key) in _PLAIN else str(key), pack(item)) for key, item in value.items()],
        )
    if isinstance(value, PackedSequence):
        return ("packed_sequence", [pack(item) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", type(value).__name__, list(value._fields), [pack(item) for item in value])
    if type(value) in (list, tuple):
        return (type(value).__name__, [pack(item) for item in value])
    return ("other", f"{type(value).__module__}.{type(value).__qualname__}")


def unpack(packed: tuple[Any, ...], place: str = "batch") -> Any:
    """Return the batch that was packed; `place` is its name in errors.

    Raises:
        CheckpointError: it contains an object that could not be saved.
    """
    kind, *rest = packed
    if kind in ("tensor", "value"):
        return rest[0]
    if kind == "array":
        return rest[0].numpy()
    if kind == "mapping":
        return {key: unpack(item, f"{place}[{key!r}]") for key, item in rest[0]}
    if kind == "other":
        raise CheckpointError(
            f"{place} was a {rest[0]}, which a capsule cannot save: it holds tensors, numbers and"
            " strings in tuples, lists and mappings. Return such a batch from the loader (its"
            " collate_fn)."
        )
    items = [unpack(item, f"{place}[{i}]") for i, item in enumerate(rest[-1])]
    if kind == "named":
        return collections.namedtuple(rest[0], rest[1])(*items)
    if kind == "packed_sequence":
        return PackedSequence(*items)
    return tuple(items) if kind == "tuple" else items


def tensors_in(batch: Any, place: str = "batch") -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch, each with its place, as ("batch[0]", ...)."""
    if isinstance(batch, Tensor):
        return [(place, batch)]
    if isinstance(batch, Mapping):
        return [
            pair for key, item in batch.items() for pair in tensors_in(item, f"{place}[{key!r}]")
        ]
    if isinstance(batch, (list, tuple)):
        return [pair for i, item in enumerate(batch) for pair in tensors_in(item, f"{place}[{i}]")]
    return []
