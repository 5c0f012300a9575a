"""Which of torch's implementations of an optimizer makes the update: the fused one, where the user leaves it open.

torch's SGD, Adam, AdamW and Adagrad have three: a loop over parameters, "foreach" (an operation on all parameters at a time)
and "fused" (all operations on a parameter in one pass over its memory). Left alone torch takes the loop on a CPU and foreach
on a GPU; the fused one is the fastest on both, and rounds otherwise in the last bit. `fused=False` or `foreach=...` at the
optimizer stays, and so does what a checkpoint was made with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_HAVE_IT = (SGD, Adam, AdamW, Adagrad)
_ON = ("cpu", "cuda")


def use_fused(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Choose the fused implementation for each parameter group that can have it.

    Args:
        optimizers: new ones, without state.
        model: whose parameters they update.
    """
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        return  # gradients of nn.Embedding(sparse=True), which the fused one refuses
    for optimizer in optimizers:
        for group in optimizer.param_groups if type(optimizer) in _HAVE_IT else ():
            if _can(group):
                group["fused"] = True


def _can(group: dict[str, object]) -> bool:
    asked = group.get("foreach") is not None or group.get("fused") is not None
    if asked or group.get("differentiable") or group.get("capturable"):
        return False
    parameters: list[torch.Tensor] = group["params"]  # type: ignore[assignment]
    return all(p.is_floating_point() and p.device.type in _ON and p.layout is torch.strided for p in parameters)
