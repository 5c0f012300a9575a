"""Pieces: what a rank holds of a tensor, how it is filled, and how large the whole is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A rank's part of a tensor, a box of it.

    Attributes:
        local: the part; shares the tensor's memory.
        at: where it begins in the whole tensor, for each dimension.
        shape: of the whole tensor.
        is_first: whether this is the first rank that holds this part: replicas hold it too. False
            for an empty part.
    """

    local: Tensor
    at: tuple[int, ...]
    shape: tuple[int, ...]
    is_first: bool


class Stored(Protocol):
    """A tensor of a checkpoint that is read when it is needed; see checkpoint/pieces.py."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def into(self, piece: Piece) -> None:
        """Fill a rank's part of a tensor of this shape."""

    def whole(self) -> Tensor:
        """Return all of it, on the CPU."""


class OwnPart:
    """What this rank holds of a tensor, to be read as one of a checkpoint is (Stored)."""

    def __init__(self, local: Tensor, shape: tuple[int, ...]) -> None:
        self._local = local
        self.shape, self.dtype = shape, local.dtype

    def into(self, piece: Piece) -> None:
        """Fill this rank's part of a tensor of this shape."""
        with torch.no_grad():
            piece.local.copy_(self._local)

    def whole(self) -> Tensor:
        """Refuse: the rest is other ranks'."""
        raise ValueError(
            f"it has a tensor of shape {list(self.shape)}, of which each rank holds a part, and no"
            " weight has this shape"
        )


def fill(piece: Piece, value: Tensor | Stored) -> None:
    """Fill a rank's part of a tensor from a whole value of its shape."""
    if not isinstance(value, Tensor):
        value.into(piece)
        return
    box = tuple(slice(at, at + size) for at, size in zip(piece.at, piece.local.shape, strict=True))
    with torch.no_grad():
        piece.local.copy_(value[box])


def filling(
    piece_of: Callable[[Tensor], Piece],
) -> Callable[[Tensor, Tensor | Stored], None]:
    """Return a function that fills what this rank holds of a tensor from a whole value, as a
    checkpoint has it; `piece_of` is the engine's.
    """
    return lambda tensor, value: fill(piece_of(tensor), value)


def numel_of(parameter: Tensor) -> int:
    """Return the number of elements of the whole parameter;
    DeepSpeed's stage 3 leaves an empty tensor and a note of it.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))
