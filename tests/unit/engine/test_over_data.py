"""Sums and gathers in which the ranks of a tensor group count once."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.threads import ThreadEngine, World


@pytest.mark.parametrize(("tensor", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (4, [0])])
def test_a_group_counts_once(tensor: int, expected: list[int]) -> None:
    """By its first rank, and on all ranks alike; without groups each rank counts."""

    def work(engine: ThreadEngine) -> tuple[list[int], int, list[float]]:
        engine.ranks.tensor_size = tensor
        with engine:
            rank, data = engine.ranks.rank, engine.data
            total = data.all_reduce(torch.full((2,), rank / 2)).tolist()
            return data.all_gather_object(rank), data.sum_number(rank), total

    total = sum(expected)
    assert World(4).run(work) == [(expected, total, [total / 2, total / 2])] * 4
