"""Pinned memory of the host, which an accelerator copies to beside its computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # bytes
_LEAST = 2**20  # bytes of a block


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return pinned memory for each tensor, of its shape, strides and dtype; not filled.

    torch rounds each pinned block up to a power of two, and never returns it: a block for each
    tensor takes up to twice their bytes. These share blocks of such sizes, each the largest that
    the rest fills.
    """
    sizes = [_bytes_of(tensor) for tensor in tensors]
    left = sorted(range(len(tensors)), key=lambda place: -sizes[place])
    rest = sum(sizes)
    made: dict[int, Tensor] = {}
    while left:
        largest = 1 << (sizes[left[0]] - 1).bit_length()
        filled = 1 << (rest.bit_length() - 1)
        room = max(largest, filled, _LEAST)
        # each part is a storage of its own, so that it is saved without the others
        block = torch.empty(room, dtype=torch.uint8, pin_memory=True).numpy()
        offset = 0
        later = []
        for place in left:
            if offset + sizes[place] > room:
                later.append(place)
                continue
            like = tensors[place]
            part = torch.frombuffer(block, dtype=like.dtype, count=_extent(like), offset=offset)
            made[place] = part.as_strided(like.size(), like.stride())
            offset += sizes[place]
        rest -= offset
        left = later
    return [made[place] for place in range(len(tensors))]


def _extent(tensor: Tensor) -> int:
    """Return how many elements of memory a tensor spans: 1 or more."""
    dims = zip(tensor.size(), tensor.stride(), strict=True)
    return max(1, 1 + sum((size - 1) * stride for size, stride in dims))


def _bytes_of(tensor: Tensor) -> int:
    return -(-_extent(tensor) * tensor.element_size() // _ALIGNED) * _ALIGNED
