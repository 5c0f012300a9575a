"""Compares two outputs of a forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TaskError

# By dtype; relative to the largest value. The kernels of two programs add in different orders.
_RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def tensors_of(output: Any, name: str) -> list[Tensor]:
    """Return the tensors of an output, in order: a tensor, or tuples, lists and dicts of them;
    `name` is for errors.

    Raises:
        TaskError: it holds something else, or no tensor.
    """
    tensors = list(_walk(output, name))
    if not tensors:
        raise TaskError(
            f"{name} returned no tensor; an exported forward must return one, or a tuple, list or"
            " dict of them."
        )
    return tensors


def _walk(output: Any, name: str) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, tuple, list)):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _walk(item, name)
    elif output is not None:
        raise TaskError(
            f"{name} returned a {type(output).__name__}; an exported forward must return a tensor,"
            " or a tuple, list or dict of tensors."
        )


def difference_of(expected: Any, actual: Any, name: str) -> float:
    """Return the largest difference of two outputs; infinity if their shapes or NaNs differ."""
    a, b = tensors_of(expected, name), tensors_of(actual, name)
    if [tensor.shape for tensor in a] != [tensor.shape for tensor in b]:
        return math.inf
    return max(_difference(x, y) for x, y in zip(a, b, strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    if a.dtype == b.dtype and torch.equal(a, b):
        # without copies in float64, which logits of a large vocabulary would fill gigabytes with
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    apart = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


def tolerance_of(expected: Any) -> float:
    """Return the difference explained by the order of additions:
    the last digits of the largest number.
    """
    floats = [tensor for tensor in tensors_of(expected, "forward") if tensor.dtype in _RELATIVE]
    largest = [float(tensor.abs().nan_to_num(0, 0, 0).max()) for tensor in floats if tensor.numel()]
    return max((_RELATIVE[tensor.dtype] for tensor in floats), default=0.0) * max([1.0, *largest])
