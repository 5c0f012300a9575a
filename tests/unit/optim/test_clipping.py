"""Clipping of dense and sparse gradients, as one vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from trainkit.optim.clipping import clip, multiply


def gradients(sparse: bool) -> tuple[list[torch.optim.Optimizer], list[nn.Parameter]]:
    """Return optimizers over a table, of which two rows were used and one of them twice,
    and a dense layer.
    """
    table, dense = nn.Embedding(4, 2, sparse=sparse), nn.Linear(2, 1)
    with torch.no_grad():
        for i, parameter in enumerate((table.weight, dense.weight, dense.bias)):
            parameter.copy_(
                torch.arange(1.0, 1 + parameter.numel()).reshape(parameter.shape) * (i + 1)
            )
    dense(table(torch.tensor([1, 3, 1]))).square().sum().backward()
    parameters = [table.weight, dense.weight, dense.bias]
    return [
        torch.optim.SGD([table.weight], 0.1),
        torch.optim.SGD([dense.weight, dense.bias], 0.1),
    ], parameters


def dense_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """Return all gradients in one vector."""
    return torch.cat([p.grad.to_dense().reshape(-1) for p in parameters])  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("value", [0.5, 30.0, 1e9])
def test_sparse_gradients_are_clipped_as_dense_ones(algorithm: str, value: float) -> None:
    """A row that was used twice counts as one row; the gradient stays sparse."""
    results = []
    for sparse in (False, True):
        optimizers, parameters = gradients(sparse)
        before = dense_gradients(parameters)
        clip(optimizers, value, algorithm)
        assert parameters[0].grad is not None
        assert parameters[0].grad.is_sparse == sparse
        results.append(dense_gradients(parameters))
    torch.testing.assert_close(results[1], results[0])
    if value == 1e9:
        torch.testing.assert_close(results[0], before)
    elif algorithm == "norm":
        assert results[1].norm().item() == pytest.approx(min(value, before.norm().item()), rel=1e-5)
    else:
        assert results[1].abs().max().item() == pytest.approx(
            min(value, before.abs().max().item()), rel=1e-6
        )


def test_gradients_of_any_dtype_are_multiplied() -> None:
    """Each in its own dtype, dense or sparse."""
    sparse = torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (3, 2))
    gradients = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.full((), 2.0), sparse]
    multiply(gradients, torch.tensor(0.5, dtype=torch.float64))
    assert [gradient.dtype for gradient in gradients[:3]] == [torch.float32, torch.bfloat16] + [
        torch.float32
    ]
    assert gradients[0].tolist() == [0.5] * 3
    assert gradients[1].tolist() == [0.5] * 2
    assert gradients[2].item() == 1
    assert sparse.to_dense().tolist() == [[0, 0], [1, 1.5], [0, 0]]


def test_no_value_clips_nothing() -> None:
    """None leaves all as it is."""
    optimizers, parameters = gradients(True)
    before = dense_gradients(parameters)
    clip(optimizers, None, "norm")
    assert torch.equal(dense_gradients(parameters), before)


def test_a_weight_of_two_optimizers_is_clipped_once() -> None:
    """The norm is of the gradients that there are."""
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().mul(100).backward()
    clip([SGD(model.parameters(), lr=1), SGD([model.weight], lr=1)], 1.0, "norm")
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-5)
