"""Gradients of weights that several stages hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.threads import World
from trainkit.extensions.pipeline.shared import sum_gradients


def test_a_gradient_is_that_of_all_stages_or_none() -> None:
    """Of a weight of both stages, of one, and of neither, which weight decay must not move."""

    def work(engine: Any) -> Any:
        own = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        own[0].grad = torch.full((2,), 1.0 + engine.place)
        if engine.place:
            own[1].grad = torch.full((2,), 5.0)
        sum_gradients(own, engine.comm.all_reduce)
        return [None if weight.grad is None else weight.grad.tolist() for weight in own]

    assert World(2).run(work) == [[[3.0, 3.0], [5.0, 5.0], None]] * 2


def test_without_such_weights_nothing_is_sent() -> None:
    """Not even which have a gradient; all may be frozen."""
    sum_gradients([], lambda tensor: pytest.fail("sent"))
