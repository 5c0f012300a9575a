"""What configure_optimizers may return, and parameter groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import TaskError
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


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    """An optimizer that needs a closure is told before training."""

    class Closure(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TaskError, match="LBFGS"):
        quiet(tmp_path).fit(Closure(), loader(8))


def test_a_schedule_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would change no rate."""

    class Wrong(Line):
        def configure_optimizers(self) -> Any:
            other = SGD(self.parameters(), lr=0.1)
            return [SGD(self.parameters(), lr=0.1)], [ExponentialLR(other, 0.1)]

    with pytest.raises(TaskError, match="a ExponentialLR that was made for an optimizer that it did not return"):
        quiet(tmp_path).fit(Wrong(), loader(8))
