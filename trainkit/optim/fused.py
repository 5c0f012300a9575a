"""Selects torch's fused implementation of an optimizer, unless the user chose one.

torch's SGD, Adam and AdamW have three: a loop over parameters, "foreach" (an operation on all
parameters at a time) and "fused" (all operations on a parameter in one pass over its memory).
torch's default is the loop on a CPU and foreach on a GPU; the fused one is the fastest on both (for
ResNet-50 by SGD on a CPU 14 to 24 ms in place of 52 to 118), and rounds differently in the last
bit. The user's choice (`fused`, `foreach`) is respected, and so is that of a checkpoint.

The fused one has requirements that the others lack, which `_prepare` ensures before each step:
gradient, state and weight have the same memory layout, without gaps (on a CPU it would silently mix
up elements), all momenta exist once one does, and no gradient is sparse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainkit.device.shards import is_spread

_HAVE_IT = (SGD, Adam, AdamW)
_ON = ("cpu", "cuda")


def use_fused(optimizers: Iterable[Optimizer]) -> None:
    """Choose the fused implementation for each parameter group that can have it.
    Call it before the first step.
    """
    for optimizer in optimizers:
        if type(optimizer) not in _HAVE_IT:
            continue
        for group in optimizer.param_groups:
            if _can(group) and not _lacks_rule(optimizer, group):
                group["fused"] = True
        # also if the user requests it, or adds a group that does
        optimizer.register_step_pre_hook(_prepare)
        optimizer.register_load_state_dict_post_hook(_lay_out)
        # what a script has loaded or made; the fused one counts on the weight's device
        _lay_out(optimizer)
        fused = [
            p for group in optimizer.param_groups if group.get("fused") for p in group["params"]
        ]
        for parameter in fused:
            if (step := optimizer.state.get(parameter, {}).get("step")) is not None:
                step = torch.as_tensor(step, dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter]["step"] = step


def _lacks_rule(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether weights are spread over ranks in a way that the
    fused implementation does not know (torch 2.15).
    """
    if type(optimizer) is not SGD:
        return False
    for parameter in group["params"]:
        if not parameter.is_meta:  # another pipeline stage's
            return is_spread(parameter)
    return False


def _can(group: dict[str, Any]) -> bool:
    asked = group.get("foreach") is not None or group.get("fused") is not None
    if (
        asked
        or group.get("differentiable")
        or group.get("capturable")
        or isinstance(group["lr"], Tensor)
    ):
        return False
    if group.get("momentum") and group["dampening"]:
        return False  # its first step is not dampened; with a momentum of zeros it would be
    return all(
        p.is_floating_point()
        and p.device.type in _ON
        and p.layout is torch.strided
        and (p.is_contiguous() or torch.empty_like(p).stride() == p.stride())  # else it has gaps
        for p in group["params"]
        if not (p.is_meta or is_lazy(p))
    )


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # In each step: what costs less comes first.
    lacks_momenta: bool | None = None
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        has_momentum = bool(group.get("momentum"))
        # of the user's choice, or a checkpoint's
        if _lacks_rule(optimizer, group) or (has_momentum and group["dampening"]):
            group["fused"] = False
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                group["fused"] = False
                break
            if gradient.is_contiguous() and parameter.is_contiguous():
                continue
            if gradient.stride() != parameter.stride():
                parameter.grad = dense = torch.empty_like(parameter).copy_(gradient)
                if dense.stride() != parameter.stride():
                    group["fused"] = False  # the weight has gaps in memory, and would fill them
                    break
        if has_momentum:
            lacks_momenta = _lacks_momenta(optimizer) if lacks_momenta is None else lacks_momenta
            if lacks_momenta:
                _add_momenta(optimizer, group)


def _lacks_momenta(optimizer: Optimizer) -> bool:
    """Return whether a parameter may have no momentum; looks up none of them, which hashes it."""
    state = optimizer.state
    count = 0
    for group in optimizer.param_groups:
        count += len(group["params"])
    if len(state) < count:
        return True
    for own in state.values():  # noqa: SIM110 - a generator is called for each weight
        if own.get("momentum_buffer") is None:
            return True
    return False


def _add_momenta(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Make the momenta of the parameters that have a gradient, of zeros."""
    for parameter in group["params"]:
        if parameter.grad is None or not group["fused"]:
            continue
        if optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _lay_out(optimizer: Optimizer) -> None:
    """Give the loaded state the weights' memory layout:
    in files and from other ranks it may be row by row.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            alike = (
                isinstance(value, Tensor)
                and value.layout is torch.strided
                and value.shape == parameter.shape
            )
            if alike and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
