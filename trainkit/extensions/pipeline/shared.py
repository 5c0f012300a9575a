"""Weights that several stages hold: their gradients are summed over the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainkit.device.shards import local_of
from trainkit.device.sync_guard import allowed_read


def sum_gradients(parameters: Sequence[nn.Parameter], total: Callable[[Tensor], Tensor]) -> None:
    """Sum the gradients of weights over the ranks that hold them. A weight without gradient on all
    of them has none afterwards, as in one process: momentum and weight decay leave it alone.

    Args:
        parameters: the same ones on all ranks.
        total: returns the sum of a tensor over the ranks: of gradients, and of a vector of the
            host, so that no rank waits for its device.
    """
    if not parameters:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64)
    counts = total(has_gradient)
    with allowed_read():
        used = [bool(count) for count in counts.tolist()]
    for parameter, is_used in zip(parameters, used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = local_of(parameter.grad)
        own.copy_(total(own))
