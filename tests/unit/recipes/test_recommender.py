"""The recommender: sparse gradients, and updates of used rows only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.recommender import Ratings, Recommender
from tests.helpers.toy import quiet

USERS, ITEMS = 200, 100


class Look(Recommender):
    """Records the inputs of the optimizers' steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(USERS, ITEMS, partial(torch.optim.AdamW, lr=0.01), sparse_lr=0.05)
        self.used: list[set[int]] = []
        self.optimizers: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Remember the users of the batch."""
        self.used.append(set(batch[0][:, 0].tolist()))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Look at the gradients."""
        self.optimizers.append(optimizer)
        for table in (self.users, self.items):
            assert table.weight.grad.is_sparse
        rows = self.users.weight.grad.coalesce().indices()[0]
        assert set(rows.tolist()) == self.used[-1]
        assert not self.head.weight.grad.is_sparse


def ratings(**options: Any) -> Ratings:
    """Return few ratings."""
    return Ratings(
        **{"batch_size": 16, "num_users": USERS, "num_items": ITEMS, "num_ratings": 1000} | options
    )


def test_the_tables_gradients_are_sparse(tmp_path: Path) -> None:
    """In each step the tables' gradients hold only the rows of the batch,
    and SparseAdam takes the tables.
    """
    task = Look()
    quiet(tmp_path, max_steps=3).fit(task, datamodule=ratings())
    assert [type(opt).__name__ for opt in task.optimizers] == ["SparseAdam", "AdamW"] * 3
    assert [p.shape for p in task.optimizers[0].param_groups[0]["params"]] == [
        task.users.weight.shape,
        task.items.weight.shape,
    ]


def test_rows_that_no_step_used_stay_bit_for_bit(tmp_path: Path) -> None:
    """SparseAdam moves the rows of users with a rating in one of the steps, and no other row,
    even with momentum.
    """
    task, before = Look(), Look().users.weight.detach().clone()
    quiet(tmp_path, max_steps=3).fit(task, datamodule=ratings())
    moved = (task.users.weight.detach() != before).any(1).nonzero().flatten().tolist()
    assert set(moved) == set.union(*task.used)
    assert 0 < len(moved) < USERS


def test_a_rating_is_that_of_its_pair() -> None:
    """A pair's rating is the head's value of the products, and the two biases; written out."""
    task, pairs = Look(), torch.tensor([[3, 5], [3, 6]])
    for pair, rating in zip(pairs, task(pairs), strict=True):
        user, item = task.users.weight[pair[0]], task.items.weight[pair[1]]
        product = (user[:-1] * item[:-1] * task.head.weight[0]).sum()
        torch.testing.assert_close(rating, product + task.head.bias[0] + user[-1] + item[-1])


def test_the_ratings_are_as_they_are_described() -> None:
    """The tastes' part has a standard deviation of 1, a tenth is held out,
    and the same numbers come each time.
    """
    data, again = ratings(num_ratings=50_000, noise=0.0), ratings(num_ratings=50_000, noise=0.0)
    data.setup("fit")
    again.setup("fit")
    pairs, values = data.train.tensors
    assert values.std().item() == pytest.approx(1.0, abs=0.1)
    assert (len(data.train), len(data.val)) == (45_000, 5_000)
    assert torch.equal(values, again.train.tensors[1])
    counts = torch.bincount(pairs[:, 1], minlength=ITEMS)
    assert counts[:10].sum() > 3 * counts[-10:].sum()
