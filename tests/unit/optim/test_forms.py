"""Parameter groups."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.optim import decay_groups

MODEL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))


def test_only_matrices_decay() -> None:
    """Weights of convolutions and matrices decay; biases and norms do not."""
    decayed, plain = decay_groups(MODEL, 0.1)
    assert [p.dim() for p in decayed["params"]] == [4, 2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1, 1]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_the_optimizers_own_decay_is_left() -> None:
    """Without a number the first group takes the optimizer's."""
    optimizer = torch.optim.SGD(decay_groups(MODEL), lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_frozen_parameters_are_grouped_too() -> None:
    """A frozen parameter may be unfrozen later, and is the optimizer's from the start."""
    line = nn.Linear(2, 2)
    line.bias.requires_grad_(False)
    assert [group["params"] for group in decay_groups(line)] == [[line.weight], [line.bias]]


def test_empty_groups_are_left_out() -> None:
    """A group without parameters is not made."""
    (group,) = decay_groups(nn.Linear(2, 2, bias=False))
    assert "weight_decay" not in group
