"""Clipping of a step's gradients, dense and sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainkit.sync_guard import allowed_read


def clip(optimizers: Sequence[torch.optim.Optimizer], value: float | None, algorithm: str) -> None:
    """Clip the gradients of the whole step, in place; None does nothing.

    Args:
        optimizers: whose parameters' gradients are clipped, as one vector.
        value: the largest norm, or the largest absolute value.
        algorithm: "norm" (over all parameters: Pascanu et al. 2013) or "value" (of each element).
    """
    if value is None:
        return
    every = (p for opt in optimizers for group in opt.param_groups for p in group["params"] if p.grad is not None)
    parameters = list(dict.fromkeys(every))  # one that two optimizers share is one
    sparse = [p for p in parameters if p.grad.is_sparse]
    with allowed_read():
        for parameter in sparse:  # a row that occurs twice is one row: its parts would count apart
            parameter.grad = parameter.grad.coalesce()
    if algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value)
        return
    torch.nn.utils.clip_grad_value_([p for p in parameters if not p.grad.is_sparse], value)
    for parameter in sparse:
        parameter.grad._values().clamp_(-value, value)
