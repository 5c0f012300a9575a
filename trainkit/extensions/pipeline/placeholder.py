"""Placeholder: a tensor that another stage computes. It has the shape, dtype and device, and no
values; what is computed from it is one too.

So each stage runs the whole step as the user wrote it, with masks and positions of its own, and
what would need another stage's values is noticed where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from trainkit.errors import TaskError


class Placeholder(Tensor):
    """See the module.

    Attributes:
        shape_only: a tensor without memory.
    """

    shape_only: Tensor

    @staticmethod
    def __new__(cls, shape_only: Tensor, device: torch.device) -> Placeholder:
        """Stand for a tensor like `shape_only` on a device."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            shape_only.size(),
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            layout=shape_only.layout,
            device=device,
        )
        made.shape_only = shape_only
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the shape: there is nothing else."""
        return f"Placeholder(shape={list(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the shapes of an operation."""
        first = args[0] if args else None
        if operation._schema.is_mutable and type(first) is not Placeholder:
            raise TaskError(
                f"{_name(operation)} writes what another pipeline stage computes into a tensor of"
                " this stage. Make a new tensor of it (torch.cat, torch.stack, torch.where)."
            )
        devices: list[torch.device] = []
        own = tree_map(_without_values(devices), (list(args), dict(kwargs or {})))
        if own[1].get("device") is not None:
            own[1]["device"] = torch.device("meta")
        try:
            result = operation(*own[0], **own[1])
        except (NotImplementedError, RuntimeError) as error:
            raise TaskError(
                f"{_name(operation)} needs the values of a tensor that another pipeline stage"
                f" computes ({error}). Compute it from the batch, or within the layers of a stage."
            ) from error
        return tree_map(lambda value: placeholder(value, devices[0]), result)


def placeholder(value: Any, device: torch.device) -> Any:
    """Return a placeholder like a tensor; any other value as it is."""
    if not isinstance(value, Tensor) or type(value) is Placeholder:
        return value
    return Placeholder(shape_of(value), device)


def shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor without memory like one of any kind."""
    if type(tensor) is Placeholder:
        return tensor.shape_only
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_values(devices: list[torch.device]) -> Callable[[Any], Any]:
    def of(value: Any) -> Any:
        if type(value) is Placeholder:
            devices.append(value.device)
            return value.shape_only
        return shape_of(value) if isinstance(value, Tensor) else value

    return of


def _name(operation: Any) -> str:
    return str(operation).replace("aten.", "torch.").removesuffix(".default")
