"""Tensors as small linear sketches: what ranks record of outputs, gradients and weights.

sketch   a matrix, row by row, as `width` sums of its elements with random signs; short rows stay as
         they are
place    where a rank's part is in a whole tensor

A sketch is linear, so sums, means and factors of tensors are those of their sketches, and the parts
that ranks hold are added: no rank gathers what it does not have. The norm of a difference is that
of the sketches' difference, but for some per cent (Charikar et al. 2002, count sketch).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.extensions.context.parts import chunks_of


class Place(NamedTuple):
    """A part of a whole tensor.

    Attributes:
        shape: of the whole.
        dim: along which it is a part; -1: it is the whole.
        offset: along that dimension.
        late: of its second half, where halves are apart (engine.context); -1: they are not.
    """

    shape: tuple[int, ...]
    dim: int = -1
    offset: int = 0
    late: int = -1


def place(
    shape: tuple[int, ...],
    wholes: Collection[tuple[int, ...]],
    index: int,
    parts: int,
    of_tokens: bool = False,
) -> Place | None:
    """Return the place of a tensor of `shape` among shapes that one process has; None if there is
    none.

    Args:
        wholes: shapes of one process.
        index: of the rank in its tensor group, or its context group.
        parts: ranks of the group.
        of_tokens: whether it is a context group, whose ranks have two chunks of the tokens (the
            first dimension): those of context.parts.chunks_of. Another microbatch may have as many
            tokens as a part of this one, so a part is looked for first.
    """
    if not wholes or shape in wholes and not of_tokens:
        return Place(shape)
    for whole in wholes:
        if len(whole) != len(shape):
            continue
        unlike = [dim for dim in range(len(shape)) if shape[dim] != whole[dim]]
        if len(unlike) != 1 or shape[unlike[0]] * parts != whole[unlike[0]]:
            continue
        if not of_tokens:
            return Place(whole, unlike[0], index * shape[unlike[0]])
        if unlike == [0]:
            early, late = (chunk * shape[0] // 2 for chunk in chunks_of(index, parts))
            return Place(whole, 0, early, late)
    return Place(shape) if shape in wholes else None


def sketch(tensor: Tensor, at: Place, rows: int, width: int) -> Tensor:
    """Return the sketch of a whole tensor, [rows, width], of which `tensor` is the part at `at`, in
    float64 on the host. Waits for the device.
    """
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    own = dense.reshape(rows, -1).cpu() if at.dim < 0 else None
    if own is None:
        whole = torch.zeros(at.shape, dtype=dense.dtype)
        pieces = [dense] if at.late < 0 else dense.chunk(2, at.dim)
        for piece, offset in zip(pieces, (at.offset, at.late), strict=False):
            whole.narrow(at.dim, offset, piece.shape[at.dim]).copy_(piece)
        own = whole.reshape(rows, -1)
    if own.shape[1] <= width:
        return own.to(torch.float64, copy=True)  # the run writes into its tensors
    signs = _signs(own.shape[1])
    chunks = math.ceil(own.shape[1] / width)
    summed = torch.empty(rows, width, dtype=torch.float64)
    for row in range(rows):  # one at a time: a row may be large
        padded = torch.zeros(chunks * width, dtype=torch.float64)
        padded[: own.shape[1]] = own[row].double() * signs
        summed[row] = padded.reshape(chunks, width).sum(0)
    return summed


@functools.lru_cache(maxsize=4)
def _signs(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8) * 2 - 1
