"""Tensors that are spread over ranks (engine=fsdp):
what this rank holds of them, all of them, and their norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_WHOLE = (torch.nn.Parameter, Tensor)


def is_spread(tensor: Tensor) -> bool:
    """Return whether each rank holds a part of a tensor (a DTensor)."""
    # A missing attribute costs an error's message, in each step; a spread weight has its own type.
    return type(tensor) not in _WHOLE and hasattr(tensor, "to_local")


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is spread over ranks, and any other tensor as it is;
    shares its memory.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor that is spread over ranks: call it on all of them; any other tensor as
    it is.
    """
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def norms_of(
    tensors: Sequence[Tensor], kind: float = 2.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the norm of each tensor, in one tensor of shape [len(tensors)]. Does not wait for the
    device.

    Norms of spread tensors are whole, and equal on all ranks: call it on all ranks then. Those of
    one mesh take one sum; torch has no operation on tensors of several meshes (some split by width
    too, engine.tensor).

    Args:
        kind: p of the p-norm, 1 or more; inf for the largest absolute value.
        dtype: of the norms; default: the tensors' own.
    """
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((getattr(tensor, "device_mesh", None), tensor.device), []).append(place)
    norms = [
        _norms([tensors[place] for place in places], kind, dtype) for places in groups.values()
    ]
    if len(norms) == 1:
        return norms[0]
    pairs = [
        pair
        for own, places in zip(norms, groups.values(), strict=True)
        for pair in zip(places, own.unbind(), strict=True)
    ]
    return torch.stack(
        [norm.to(tensors[0].device) for _, norm in sorted(pairs, key=lambda pair: pair[0])]
    )


def _norms(tensors: list[Tensor], kind: float, dtype: torch.dtype | None) -> Tensor:
    if not is_spread(tensors[0]):
        return torch.stack(list(torch._foreach_norm(tensors, kind, dtype=dtype)))
    # the operation's own dtype has no rule (torch 2.15)
    tensors = [tensor.to(dtype or tensor.dtype) for tensor in tensors]
    together: Any = torch.stack(list(torch._foreach_norm(tensors, kind)))
    whole: Tensor = together.full_tensor()
    return whole
