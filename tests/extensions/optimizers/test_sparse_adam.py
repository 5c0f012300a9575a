"""SparseAdam where gradients of sparse embeddings are summed as dense ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.extension import resolve
from trainkit.extensions.optimizers import EXTENSION


def tables(is_dense: bool, **options: Any) -> list[nn.Embedding]:
    """Return two tables after three updates, by SparseAdam and by SGD, as an engine with these
    options leaves their gradients.
    """
    torch.manual_seed(0)
    made = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    optimizers = [
        torch.optim.SparseAdam(made[0].parameters(), lr=0.1),
        torch.optim.SGD(made[1].parameters(), lr=0.1),
    ]
    stage = SimpleNamespace(engine=SimpleNamespace(shown_options=options))
    for feature in filter(None, (resolve(target)(stage) for target in EXTENSION.features)):
        feature.begun(SimpleNamespace(optimizers=optimizers))
    for rows in ([0, 2], [2, 2], [5, 0]):
        for table, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor(rows)).pow(2).sum().backward()
            if is_dense:
                assert table.weight.grad is not None
                table.weight.grad = table.weight.grad.to_dense()
            optimizer.step()
    assert made[1].weight.grad is not None and made[1].weight.grad.is_sparse is not is_dense
    return made


def test_it_gets_the_rows_again() -> None:
    """It updates the rows of a batch as where rows travel, and no other; SGD takes dense sums."""
    again, expected = tables(True, sparse_as_dense=True), tables(False)
    for table, other in zip(again, expected, strict=True):
        assert torch.equal(table.weight, other.weight)


def test_a_dense_gradient_of_another_cause_is_refused() -> None:
    """Without the option torch's own error stays: the Task's embedding is not sparse."""
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        tables(True)
