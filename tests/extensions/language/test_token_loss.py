"""trainkit/extensions/language/token_loss.py: chunks change neither values nor gradients, and hold
no more than their own logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.extensions.language.packing import IGNORED
from trainkit.extensions.language.token_loss import token_loss

N, D, V = 50, 8, 33


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, nn.Linear]:
    """Return states, labels of which some are ignored, and an output layer."""
    torch.manual_seed(0)
    states_ND = torch.randn(N, D, dtype=dtype, requires_grad=True)
    labels_N = torch.randint(V, (N,))
    labels_N[::7] = IGNORED
    return states_ND, labels_N, nn.Linear(D, V, bias=False, dtype=dtype)


def gradients(loss: Tensor, states_ND: Tensor, head: nn.Linear) -> list[Tensor]:
    """Return those of the states and of the layer."""
    return list(torch.autograd.grad(loss, [states_ND, head.weight]))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 50, 99])
def test_chunks_are_the_plain_loss(chunk: int | None, z_loss: float) -> None:
    """In float64 values and gradients are those of torch's cross_entropy and of log^2 Z over all
    logits, to 1e-12.
    """
    states_ND, labels_N, head = inputs()
    logits_NV = head(states_ND)
    plain = functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    squares = z_loss * logits_NV.exp().sum(-1).log()[labels_N != IGNORED].square().sum()
    made = token_loss(states_ND, labels_N, head, chunk, z_loss)
    torch.testing.assert_close(made.cross_entropy, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(made.z_loss, torch.as_tensor(squares), rtol=1e-12, atol=0)
    expected = gradients(plain + squares, states_ND, head)
    own = gradients(sum(made), states_ND, head)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


def test_no_more_than_a_chunk_has_logits() -> None:
    """The layer reads a chunk at a time, in forward and again in backward, and nothing that is saved
    in between has the vocabulary's width, but the layer itself.
    """
    states_ND, labels_N, head = inputs()
    read: list[int] = []
    head.register_forward_pre_hook(lambda module, args: read.append(len(args[0])))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = token_loss(states_ND, labels_N, head, chunk=16, z_loss=1e-4)
        assert not [tensor.shape for tensor in saved if V in tensor.shape[-1:]]
    sum(loss).backward()
    assert read[:4] == [16, 16, 16, 2]
    assert sorted(read[4:]) == [2, 16, 16, 16]


def test_all_at_once_saves_the_logits() -> None:
    """The test above sees them if they are there."""
    states_ND, labels_N, head = inputs()
    shapes: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_loss(states_ND, labels_N, head)
    assert (N, V) in shapes


def test_sums_are_in_float32() -> None:
    """Logits of bfloat16 are raised before they are exponentiated."""
    states_ND, labels_N, head = inputs(torch.bfloat16)
    made = token_loss(states_ND, labels_N, head, chunk=16)
    assert made.cross_entropy.dtype == torch.float32
    plain = functional.cross_entropy(
        head(states_ND).float(), labels_N, ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(made.cross_entropy, plain, rtol=1e-6, atol=0)


def test_without_a_token_to_predict_the_loss_is_0() -> None:
    """And its gradient too: a chunk may lie within what is ignored."""
    states_ND, labels_N, head = inputs()
    made = token_loss(states_ND, torch.full_like(labels_N, IGNORED), head, 16, 1e-4)
    assert [total.item() for total in made] == [0, 0]
    assert all(not gradient.any() for gradient in gradients(sum(made), states_ND, head))
