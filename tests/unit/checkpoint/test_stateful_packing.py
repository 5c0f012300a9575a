"""Packing and unpacking preserve a state bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.checkpoint.stateful import pack, unpack

TENSORS = [
    torch.tensor(1.5),
    torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    torch.randn(4, 3)[:, 1],
    torch.randn(3).bfloat16(),
    torch.tensor([True, False]),
    torch.empty(0, 3),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.randn(3, requires_grad=True),
    torch.tensor([float("nan"), -0.0]),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=[f"{list(t.shape)}, {t.dtype}" for t in TENSORS])
def test_tensors_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    """Of any dtype, layout and number of dimensions."""
    back = unpack(pack({"it": [tensor]}))["it"][0]
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    torch.testing.assert_close(back, tensor, rtol=0, atol=0, equal_nan=True)


def test_a_sparse_tensor_comes_back() -> None:
    """By torch's own way."""
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack(sparse)).to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "value", [None, {"a": (1, 2.5, {"b"})}, [b"x", 1j], torch.float16, torch.Size([2])]
)
def test_plain_values_come_back(value: Any) -> None:
    """As they are, also from a view of memory."""
    assert unpack(memoryview(pack(value))) == value


def test_what_was_packed_is_the_callers_own() -> None:
    """Writing into it does not change the packed bytes."""
    packed = pack(torch.zeros(2))
    unpack(packed).add_(1)
    assert torch.equal(unpack(packed), torch.zeros(2))
