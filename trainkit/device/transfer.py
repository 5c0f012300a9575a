"""Batches of any nesting: move them to a device, and count their samples."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainkit.device.accelerator import has_streams, is_accelerator
from trainkit.errors import TaskError


def to_device(
    batch: Any,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
) -> Any:
    """Return the batch with its tensors on `device`.

    Args:
        batch: tensors in tuples, named tuples, lists, mappings, dataclasses, or objects with a
            `to(device)` of their own. Classes are preserved, as a subclass of dict.
        device: the target; None leaves tensors and objects where they are.
        dtype: cast floating point tensors to it, if given; of objects, those in a PackedSequence, a
            dict (also a UserDict) or a dataclass.
        channels_last: use that memory format for tensors of 4 dimensions.
    """
    if isinstance(batch, Tensor):
        moved = batch
        if device is not None and batch.device != device:
            moved = batch.to(device, non_blocking=has_streams(device))
        if dtype is None and not channels_last:
            return moved
        cast = dtype if batch.is_floating_point() else None
        layout = (
            torch.channels_last if channels_last and batch.dim() == 4 else torch.preserve_format
        )
        return moved.to(dtype=cast, memory_format=layout)  # on the device, which is faster at both
    if type(batch) is tuple or type(batch) is list:  # most batches; before the slower checks
        return type(batch)([to_device(item, device, dtype, channels_last) for item in batch])
    # before the containers: a PackedSequence is a tuple, a BatchEncoding a mapping
    if hasattr(batch, "to"):
        moved = batch if device is None else _by_its_own(batch, device)
        if type(moved) is tuple:  # a plain batch: images decoded on the device
            return to_device(moved, device, dtype, channels_last)
        if isinstance(moved, PackedSequence):
            return moved.to(dtype) if dtype and moved.data.is_floating_point() else moved
        if dtype is None and not channels_last:
            return moved
        if not isinstance(moved, (dict, UserDict)) and not is_record(moved):
            return moved  # its copy may share what it holds
        batch, device = moved, None
    if isinstance(batch, Mapping):
        items = {
            key: to_device(value, device, dtype, channels_last) for key, value in batch.items()
        }
        if type(batch) is dict or not isinstance(batch, (dict, UserDict)):
            return items
        mapping: Any = copy.copy(batch)
        for key, item in items.items():
            mapping[key] = item  # some (transformers' ModelOutput) refuse update()
        return mapping
    if is_record(batch):
        return with_fields(batch, lambda value: to_device(value, device, dtype, channels_last))
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device, dtype, channels_last) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(item, device, dtype, channels_last) for item in batch)
    return batch


def _by_its_own(batch: Any, device: torch.device) -> Any:
    """Return what an object's `to` returns, or the object if it moves in place and returns None:
    without a wait for the copy, if it can say so.
    """
    kind: Any = type(batch)
    quick = has_streams(device) and _takes_non_blocking(kind)
    moved = batch.to(device, non_blocking=True) if quick else batch.to(device)
    return batch if moved is None else moved


@functools.cache
def _takes_non_blocking(kind: type) -> bool:
    if issubclass(kind, PackedSequence):
        return True
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of C code
        return False


def is_record(batch: Any) -> bool:
    """Whether a batch is a dataclass."""
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _fields_of(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the fields that a dataclass has set."""
    return (
        (f.name, getattr(record, f.name))
        for f in dataclasses.fields(record)
        if hasattr(record, f.name)
    )


def with_fields(record: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with each of its fields changed."""
    copied = copy.copy(record)
    for name, value in _fields_of(record):
        object.__setattr__(copied, name, change(value))  # also if it is frozen
    return copied


def _items_of(batch: Any) -> Iterable[Any] | None:
    """Return what a container of a batch holds; None if it is none."""
    if isinstance(batch, (list, tuple)):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    return (item for _, item in _fields_of(batch)) if is_record(batch) else None


class Mover:
    """Moves batches to a device; for an accelerator on a stream of its own, so the copy runs beside the
    computation.

    The loop is ahead of the device (only Horovod's engine waits), so a batch is copied while the
    step before is computed.

    Args:
        device, dtype, channels_last: see `to_device`.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None = None, channels_last: bool = False
    ) -> None:
        self._how = (device, dtype, channels_last)
        self._stream = torch.Stream(device) if has_streams(device) else None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device, for use on the current stream."""
        if self._stream is None:
            return batch if self._is_there(batch) else to_device(batch, *self._how)
        if not all(may_go_beside(tensor) for tensor in each_tensor(batch)):
            return to_device(batch, *self._how)
        with self._stream:
            moved = to_device(batch, *self._how)
        computing = torch.accelerator.current_stream(self._how[0])
        computing.wait_stream(self._stream)
        for tensor in each_tensor(moved):
            if is_accelerator(tensor.device):
                # the copying stream must not reuse its memory too soon
                tensor.record_stream(computing)
        return moved

    def cast(self, batch: Any) -> Any:
        """Return a batch that the user has moved, in the type and layout of this one's."""
        _, dtype, channels_last = self._how
        return to_device(batch, None, dtype, channels_last) if dtype or channels_last else batch

    def for_loader(self, index: int) -> Callable[[Any], Any]:
        """Return what moves the batches of the loader with this number: the same for all."""
        return self

    def _is_there(self, batch: Any) -> bool:
        """Whether no copy is needed: a fast check, only for the commonest batches."""
        device, dtype, channels_last = self._how
        if dtype is not None or channels_last or type(batch) not in (tuple, list):
            return False
        return all([type(item) is Tensor and item.device == device for item in batch])  # noqa: C419 - a list is faster


def may_go_beside(tensor: Tensor) -> bool:
    """Whether a tensor of a batch may be copied to an accelerator on a stream of its own.

    A tensor that is there was made on the current stream, for which the other does not wait. A sparse or
    nested one is copied as several tensors, and torch cannot hold their memory for another stream
    (`record_stream`).
    """
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


def each_tensor(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, also those in objects with
    attributes (a PackedSequence, a BatchEncoding, ...).
    """
    if isinstance(batch, Tensor):
        yield batch
    elif (items := _items_of(batch)) is not None:
        yield from (tensor for item in items for tensor in each_tensor(item))
    elif hasattr(batch, "to") and hasattr(batch, "__dict__"):
        yield from (tensor for item in vars(batch).values() for tensor in each_tensor(item))


def count_samples(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor, the number of sequences of a
    PackedSequence; without a tensor the length of the first array or list of texts or objects.

    Raises:
        TaskError: there is none of these in the batch.
    """
    size = _first_length(batch)
    size = _length_of_list(batch) if size is None else size
    if size is None:
        raise TaskError(
            f"The number of samples of a batch of type {type(batch).__name__} is unknown: it holds"
            " no tensor, array or list. Add a tensor with an entry for each sample in the collate_fn,"
            " or give a Dataset of known length, of which samples are counted by their indices."
        )
    return size


def _length_of_list(batch: Any) -> int | None:
    """Return the length of what holds samples: torch collates texts, and pairs of texts, as a list
    of them, and of tuples.
    """
    if isinstance(batch, Mapping):
        lengths = (_length_of_list(value) for value in batch.values())
        return next((length for length in lengths if length is not None), None)
    if isinstance(batch, np.ndarray):
        return len(batch) if batch.ndim else None
    if not isinstance(batch, (list, tuple)) or not batch:
        return None
    is_nested = isinstance(batch[0], (list, tuple, np.ndarray))
    return _length_of_list(batch[0]) if is_nested else len(batch)


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    items = () if (held := _items_of(batch)) is None else held
    return next((size for item in items if (size := _first_length(item)) is not None), None)
