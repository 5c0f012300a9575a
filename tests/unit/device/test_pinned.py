"""Pinned memory for many tensors: as few bytes as torch's rounding allows, each tensor its own."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from tests.helpers.late_device import late_device
from trainkit.device import pinned
from trainkit.device.pinned import pinned_like


def blocks_of(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the memory of each, and the sizes of the blocks that were pinned."""
    sizes: list[int] = []
    real = torch.empty

    def empty(size: int, **options: object) -> Tensor:
        sizes.append(size)
        return real(size, **options)  # type: ignore[call-overload, no-any-return]

    with late_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(pinned, "_LEAST", 64)
        made = pinned_like(tensors)
        assert all(tensor.is_pinned() for tensor in made)
    return made, sizes


TENSORS = [
    torch.randn(100, 30),
    torch.randn(30, 100).t(),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(7, 6)[:, ::2],
    torch.tensor(3.0),
    torch.arange(5),
    torch.randn(33).bfloat16(),
    torch.zeros(0, 3),
    torch.ones(3) > 0,
]


def test_each_tensor_has_memory_of_its_layout() -> None:
    """Of its own: what is written to one is not seen in another, and is saved without the others."""
    made, _ = blocks_of(TENSORS)
    for one, like in zip(made, TENSORS, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (like.shape, like.stride(), like.dtype)
        one.copy_(like)
    assert all(torch.equal(one, like) for one, like in zip(made, TENSORS, strict=True))
    buffer = io.BytesIO()
    torch.save(made[4], buffer)
    assert len(buffer.getvalue()) < 4000


@pytest.mark.parametrize(
    ("numels", "most"), [([1200] * 10, 1.25), ([700, *[33] * 400], 1.15), ([1025], 2.0)]
)
def test_blocks_are_filled(numels: list[int], most: float) -> None:
    """Each has a size that torch allocates as it is. A block for each tensor would take 1.7 and 2
    times the bytes of the first two cases; alone, a tensor takes what it must.
    """
    tensors = [torch.zeros(numel) for numel in numels]
    made, sizes = blocks_of(tensors)
    assert len(made) == len(tensors)
    assert all(size & (size - 1) == 0 for size in sizes)
    own = sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)
    assert own <= sum(sizes) <= most * own
