"""Parts of a sequence: which tokens a rank has, and which keys its queries see.

With c ranks a sequence is cut into 2 c chunks of as many tokens, and rank r has the chunks r and
2 c - 1 - r: an early one, whose tokens see few others, and a late one, so that each rank computes
as much of causal attention.

B batch, H heads, T tokens of the whole sequence, S tokens of a chunk, K width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right


def chunks_of(place: int, ranks: int) -> tuple[int, int]:
    """Return the chunks, of 2 x `ranks`, that a rank has, in the order of its tokens."""
    return place, 2 * ranks - 1 - place


def part_of(tensor: Tensor, dim: int, place: int, ranks: int) -> Tensor:
    """Return a rank's part of a tensor, whose size along `dim` is a multiple of 2 x `ranks`."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(place, ranks)], dim)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the whole of what the ranks have, in the order of the sequence."""
    halves = [part.chunk(2, dim) for part in parts]
    early = [first for first, _ in halves]
    late = [last for _, last in reversed(halves)]
    return torch.cat([*early, *late], dim)


def padded(tensor: Tensor, dim: int, length: int, fill: float) -> Tensor:
    """Return a tensor with `length` entries along `dim`, the last ones of which are `fill`."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, fill)], dim)


def mask_of_chunk(
    chunk: int, size: int, documents_BT: Tensor | None, device: torch.device
) -> Tensor:
    """Return which keys the queries of a chunk see: of all up to the chunk's end, those at their
    own place and before it, of the same document.

    Args:
        chunk: its place in the sequence.
        size: S.
        documents_BT: the number of each token's document; None: all are of one.
        device: of the queries.

    Returns:
        Without documents torch's own bias of S queries and (chunk + 1) x S keys, which kernels
        compute in place of reading it; else booleans [B, 1, S, (chunk + 1) x S].
    """
    end = (chunk + 1) * size
    if documents_BT is None:
        return _lower_right(size, end)
    places_T = torch.arange(end, device=device)
    before_ST = places_T[end - size :, None] >= places_T
    return before_ST & same_document(documents_BT[:, end - size : end], documents_BT[:, :end])


@functools.lru_cache(maxsize=64)
def _lower_right(queries: int, keys: int) -> Tensor:
    """Return torch's bias, which has no values; one may not be made while operations are recorded."""
    bias: Tensor = causal_lower_right(queries, keys)
    return bias


def same_document(of_queries_BQ: Tensor, of_keys_BT: Tensor) -> Tensor:
    """Return whether queries and keys are of one document, [B, 1, Q, T]."""
    return of_queries_BQ[:, None, :, None] == of_keys_BT[:, None, None, :]


def attend_before(
    place: tuple[int, int],
    query_BHTK: Tensor,
    keys: Tensor,
    values: Tensor,
    documents_BT: Tensor | None,
    **options: Any,
) -> Tensor:
    """Return causal attention of a rank's queries: of each chunk, on the keys up to its end.

    Args:
        place: of the rank, and the number of ranks.
        query_BHTK: of this rank's tokens.
        keys: of the whole sequence, as `values` and `documents_BT`.
        options: torch's.
    """
    outputs = []
    for chunk, query_BHSK in zip(chunks_of(*place), query_BHTK.chunk(2, 2), strict=True):
        size = query_BHSK.shape[2]
        end = (chunk + 1) * size
        mask = mask_of_chunk(chunk, size, documents_BT, query_BHSK.device)
        of_chunk = query_BHSK, keys[:, :, :end], values[:, :, :end], mask
        outputs.append(functional.scaled_dot_product_attention(*of_chunk, **options))
    return torch.cat(outputs, 2)


def attend_all(
    place: tuple[int, int],
    length: int,
    query_BHTK: Tensor,
    keys: Tensor,
    values: Tensor,
    documents_BT: Tensor | None,
    **options: Any,
) -> Tensor:
    """Return attention of a rank's queries on the first `length` tokens, which fill nothing up; the
    rest is as for `attend_before`.
    """
    keys, values = keys[:, :, :length], values[:, :, :length]
    mask = None
    if documents_BT is not None:
        own_BT = part_of(documents_BT, 1, *place)
        # what fills up is of no document: it sees all, and no token sees it
        mask = same_document(own_BT, documents_BT[:, :length]) | (own_BT < 0)[:, None, :, None]
    return functional.scaled_dot_product_attention(query_BHTK, keys, values, mask, **options)


def documents_of_positions(positions_BT: Tensor) -> Tensor:
    """Return the number of each token's document, [B, T]: a document begins where positions do not
    continue.
    """
    continues = positions_BT.diff(dim=1) == 1
    return functional.pad((~continues).cumsum(1), (1, 0))
