"""Parts of a sequence, and what of it their queries see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainkit.extensions.context.parts import (
    attend_all,
    attend_before,
    chunks_of,
    documents_of_positions,
    joined,
    padded,
    part_of,
)

TOKENS = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 1 + [1] * 11])


def tensors(heads: int = 4, heads_of_keys: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two rows."""
    draw = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, count, TOKENS, 6, generator=draw, dtype=torch.float64)
        for count in (heads, heads_of_keys, heads_of_keys)
    )
    return query, key, value


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_joined_again(ranks: int, dim: int) -> None:
    """In the order of the sequence, each token once."""
    whole = torch.arange(TOKENS * TOKENS).view(TOKENS, TOKENS)
    parts = [part_of(whole, dim, place, ranks) for place in range(ranks)]
    assert all(part.shape[dim] == TOKENS // ranks for part in parts)
    assert torch.equal(joined(parts, dim), whole)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_compute_as_much(ranks: int) -> None:
    """The chunks that a rank's queries see, together."""
    assert len({sum(chunks_of(place, ranks)) for place in range(ranks)}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_causal_attention_is_that_of_the_whole(ranks: int, documents: Tensor | None) -> None:
    """Of all ranks together; with fewer heads of keys, and documents."""
    query, key, value = tensors()
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    expected = functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
    parts = [
        attend_before(
            (place, ranks), part_of(query, 2, place, ranks), key, value, documents, enable_gqa=True
        )
        for place in range(ranks)
    ]
    torch.testing.assert_close(joined(parts, 2), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_attention_to_all_does_not_see_what_fills_up(documents: Tensor | None) -> None:
    """Eleven tokens and one that fills up, on three ranks."""
    query, key, value = tensors(heads_of_keys=4)
    length = TOKENS - 1
    seen, filled = None, None
    if documents is not None:
        own = documents[:, :length]
        seen = own[:, None, :, None] == own[:, None, None, :]
        filled = padded(own, 1, TOKENS, -1)
    expected = functional.scaled_dot_product_attention(
        *(each[:, :, :length] for each in (query, key, value)), seen
    )
    parts = [
        attend_all((place, 3), length, part_of(query, 2, place, 3), key, value, filled)
        for place in range(3)
    ]
    whole = joined(parts, 2)
    torch.testing.assert_close(whole[:, :, :length], expected, rtol=0, atol=1e-15)
    assert whole.isfinite().all()


def test_documents_begin_where_positions_do_not_continue() -> None:
    """Also in the middle of one, as a row that was cut out of a stream."""
    positions = torch.tensor([[3, 4, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    assert documents_of_positions(positions).tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]


def test_what_fills_up_comes_last() -> None:
    """With the value that is given; nothing is copied where nothing is missing."""
    own = torch.arange(3)[None]
    assert padded(own, 1, 4, -100).tolist() == [[0, 1, 2, -100]]
    assert padded(own, 1, 3, -100) is own
