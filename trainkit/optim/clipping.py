"""Clipping of a step's gradients, dense and sparse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.device.shards import is_spread, local_of, norms_of
from trainkit.device.sync_guard import allowed_read


def with_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return the parameters that have a gradient; one that two optimizers share is one."""
    every = (
        p
        for opt in optimizers
        for group in opt.param_groups
        for p in group["params"]
        if p.grad is not None
    )
    return list(dict.fromkeys(every))


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients, in place, by a scalar tensor: on a GPU a kernel or two for a dtype."""
    of_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        of_dtype[gradient.dtype].append(local_of(gradient))
    for dtype, same in of_dtype.items():
        torch._foreach_mul_(same, factor.to(dtype))


def clip(
    optimizers: Sequence[torch.optim.Optimizer],
    value: float | None,
    algorithm: str,
    norm_of: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> None:
    """Clip the gradients of the whole step, in place; None, and 0 or less, does nothing.

    Args:
        optimizers: the gradients of their parameters are clipped, as one vector.
        value: the largest norm, or the largest absolute value.
        algorithm: "norm" (over all parameters: Pascanu et al. 2013) or "value" (of each element).
        norm_of: returns the norm of all gradients as one vector, if other ranks hold further ones.
    """
    if value is None or value <= 0:
        return
    parameters = with_gradients(optimizers)
    sparse = [p for p in parameters if p.grad.is_sparse]
    with allowed_read():
        # a row that occurs twice is one row: its parts must not count separately
        for parameter in sparse:
            parameter.grad = parameter.grad.coalesce()
    seen = [p for p in parameters if not p.grad.is_sparse] + [_dense(p.grad) for p in sparse]
    is_spread_out = norm_of is not None or any(is_spread(p.grad) for p in seen)
    if algorithm == "norm" and is_spread_out:
        gradients = [p.grad for p in seen]
        if norm_of is None:
            total = torch.linalg.vector_norm(norms_of(gradients))
        else:
            total = norm_of(gradients)
        torch._foreach_mul_(
            [local_of(grad) for grad in gradients], (value / (total + 1e-6)).clamp(max=1.0)
        )
    elif algorithm == "norm":
        torch.nn.utils.clip_grad_norm_(seen, value)
    else:
        torch.nn.utils.clip_grad_value_(seen, value)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a stand-in with a sparse gradient's rows as its gradient:
    older torch (2.11) clips no sparse ones.
    """
    rows = grad._values()
    stand_in = rows.detach()
    stand_in.grad = rows
    return stand_in


def clear_gradients(optimizers: Sequence[Optimizer], others: Sequence[Tensor] = ()) -> None:
    """Drop the gradients of optimizers' parameters, and those of other parameters, which would be
    summed again and again.

    Like `optimizer.zero_grad()`, without its record for torch's profiler, which takes longer than
    all the rest.
    """
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad()  # it overrides it
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    for other in others:
        other.grad = None
