"""Sketches of tensors: linear, with the norm of the tensor, of parts and of wholes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.extensions.check_engine.sketch import Place, place, sketch
from trainkit.extensions.context.parts import part_of

WIDTH = 64


def tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_short_row_is_its_elements() -> None:
    """And not the run's memory: what the run writes later does not change it."""
    own = tensor(3, WIDTH).double()
    before = own.clone()
    made = sketch(own, Place((3, WIDTH)), 3, WIDTH)
    own.zero_()
    assert torch.equal(made, before)


def test_a_long_row_has_the_norm_of_its_elements() -> None:
    """Within some per cent, in WIDTH numbers; a sum of tensors is the sum of their sketches."""
    one, other = tensor(4, 9_999), tensor(4, 9_999, seed=2)
    at = Place((4, 9_999))
    made = [sketch(each, at, 4, 2048) for each in (one, other, one + other)]
    assert made[0].shape == (4, 2048)
    assert float(made[0].norm()) == pytest.approx(float(one.norm()), rel=0.1)
    torch.testing.assert_close(made[0] + made[1], made[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_ranks_add_up_to_the_whole(dim: int) -> None:
    """Whatever dimension is split, and whether rows are short or long."""
    whole = tensor(4, 6, 10)
    at = Place((4, 6, 10))
    parts = whole.chunk(2, dim)
    for width in (16, 240):
        total = sum(
            sketch(part, Place(at.shape, dim, i * part.shape[dim]), 1, width)
            for i, part in enumerate(parts)
        )
        torch.testing.assert_close(total, sketch(whole, at, 1, width))


@pytest.mark.parametrize("width", [16, 240])
def test_chunks_of_context_ranks_add_up_to_the_whole(width: int) -> None:
    """A rank has an early and a late one, of the first dimension after that of samples."""
    whole = tensor(4, 12, 5)
    total: Any = 0
    for index in range(3):
        part = part_of(whole, 1, index, 3)
        at = place(tuple(part.shape[1:]), {(12, 5)}, index, 3, of_tokens=True)
        assert at is not None
        total += sketch(part, Place((4, *at.shape), at.dim + 1, at.offset, at.late), 4, width)
    torch.testing.assert_close(total, sketch(whole, Place((4, 12, 5)), 4, width))
    assert place((12, 1), {(12, 3)}, 0, 3, of_tokens=True) is None
    # another microbatch of one process has half the tokens
    assert place((4, 5), {(4, 5), (8, 5)}, 0, 2, of_tokens=True) == Place((8, 5), 0, 0, 6)
    assert place((4, 5), {(4, 5)}, 0, 2, of_tokens=True) == Place((4, 5))


def test_a_part_is_placed_by_its_rank() -> None:
    """A shape of one process is whole; one that is smaller in one dimension is a part."""
    assert place((4, 8), {(4, 8)}, 1, 2) == Place((4, 8))
    assert place((4, 4), {(4, 8)}, 1, 2) == Place((4, 8), 1, 4)
    assert place((2, 8), {(4, 8)}, 1, 2) == Place((4, 8), 0, 2)


@pytest.mark.parametrize("shape", [(2, 4), (4, 3), (8,)])
def test_another_shape_has_no_place(shape: tuple[int, ...]) -> None:
    """Two dimensions that differ, an uneven one, and another number of dimensions."""
    assert place(shape, {(4, 8)}, 1, 2) is None
