"""The example input for tracing and comparison:
a tuple of tensors with the batch as first dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.api.task import Task
from trainkit.errors import ConfigError


def example_of(task: Task, example_input: Any) -> tuple[Tensor, ...]:
    """Return the arguments of `forward`, on the CPU.

    Args:
        task: may have an `example_input_array`.
        example_input: a tensor or a tuple of tensors; None for the Task's own.

    Raises:
        ConfigError: there is no example, or it is something else.
    """
    key = "example_input"
    if example_input is None:
        example_input = getattr(task, "example_input_array", None)
        key = f"{type(task).__name__}.example_input_array"
    args = tuple(example_input) if isinstance(example_input, (tuple, list)) else (example_input,)
    if not args or not all(isinstance(arg, Tensor) for arg in args):
        kinds = ", ".join(type(arg).__name__ for arg in args) or "empty tuple"
        raise ConfigError(
            f"{key} is of type {kinds}; it must be a tensor or a tuple of tensors: the arguments of"
            " forward()."
        )
    if rows_of(args) == 0:
        raise ConfigError(
            f"{key} has no samples: its first tensor has shape {list(args[0].shape)}. Give it one"
            " or more."
        )
    return tuple(arg.detach().cpu() for arg in args)


def rows_of(args: tuple[Any, ...]) -> int:
    """Return the batch size: the length of the first tensor; 0 if it is a scalar."""
    return len(args[0]) if args[0].dim() else 0


def is_batch(arg: Tensor, args: tuple[Tensor, ...]) -> bool:
    """Return whether an argument has a row per sample."""
    return arg.dim() > 0 and len(arg) == rows_of(args)


def resized(args: tuple[Tensor, ...], num_rows: int) -> tuple[Tensor, ...]:
    """Return the arguments with `num_rows` samples, repeated cyclically."""
    places = torch.arange(num_rows) % rows_of(args)
    return tuple(arg[places] if is_batch(arg, args) else arg for arg in args)
