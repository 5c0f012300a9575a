"""What checkpoints hold of optimizers' settings and of schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Absolute rates beside `lr` in a parameter group, which are scaled as it is.
GROUP_RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr")
# of a group: no settings of training
_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable")


def settings_of(group: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Return the plain settings of a group as the user gave them."""
    settings = {}
    for name, value in group.items():
        if name not in (*_IMPLEMENTATION, *GROUP_RATES) and _plain(value):
            settings[name] = list(value) if isinstance(value, tuple) else value
    return settings | {"lr": lr}


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state.

    Scalars of it (NAdam's mu_product, ASGD's eta) have the dtype they were saved in: torch casts
    them to the weights', and the run would round otherwise from there on. A rate that is a tensor
    stays this tensor, with the saved value.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    places = [place for group in state.get("param_groups", ()) for place in group["params"]]
    for place, weight in zip(places, weights, strict=False):
        for name, value in state["state"].get(place, {}).items():
            if isinstance(value, Tensor) and value.dim() == 0 < weight.dim():
                own = optimizer.state[weight]
                own[name] = value.to(own[name].device, copy=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(rate, Tensor):
            group["lr"] = rate.fill_(float(group["lr"]))


def in_order(saved: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
    """Return a saved state without the names in `param_names` (torch's key), each weight's part of
    it at the place that the weight of this name has now: torch goes by places alone. If it has
    other names, all stay at their places.

    Args:
        names: the optimizer's weights, in its order; None for one that is not the task's.
    """
    if "param_groups" not in saved:  # an optimizer's own form of state
        return dict(saved)
    groups = [dict(group) for group in saved["param_groups"]]
    there = [name for group in groups for name in group.pop("param_names", ())]
    places = {name: place for place, name in enumerate(names)}
    moved: dict[Any, int] = {}
    if places.keys() == {*there} and len(places) == len(there) == len(names):
        moved = {place: places[name] for place, name in enumerate(there)}
    state = {moved.get(place, place): value for place, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def lacking(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
    """Return the names that a step of this optimizer reads of a parameter's state, and that a saved
    state lacks: another class has written it, or amsgrad was off.

    Groups of the same settings are not compared, nor are classes that are not torch's.
    """
    names = set[str]()
    for old, group in zip(saved.get("param_groups", ()), optimizer.param_groups, strict=False):
        if len(old["params"]) != len(group["params"]) or settings_of(old, 0) == settings_of(
            group, 0
        ):
            continue
        pairs = zip(group["params"], old["params"], strict=True)
        parameter, index = min(pairs, key=lambda pair: pair[0].numel())
        if there := saved["state"].get(index):
            names |= _state_names(optimizer, group, parameter) - there.keys()
    return sorted(names)


def _state_names(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> set[str]:
    """Return what one step of a new optimizer of the same class leaves for a parameter."""
    kind = type(optimizer)
    others = (torch.optim.LBFGS, torch.optim.SparseAdam)  # their steps need more than a gradient
    if vars(torch.optim).get(kind.__name__) is not kind or kind in others:
        return set()
    probe = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
    probe.grad = torch.zeros_like(probe)
    own = {name: value for name, value in group.items() if name not in _IMPLEMENTATION}
    taken = inspect.signature(kind).parameters.keys() & optimizer.defaults.keys()
    given = {name: optimizer.defaults[name] for name in taken - {*_IMPLEMENTATION}}
    new = kind([{**own, "params": [probe]}], **given)
    new.step()
    return set(new.state[probe])


def with_inner(schedulers: Iterable[LRScheduler]) -> Iterator[LRScheduler]:
    """Yield each scheduler once, with those inside SequentialLR and ChainedScheduler."""
    seen: set[int] = set()
    todo = list(schedulers)
    while todo:
        scheduler = todo.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            todo += getattr(scheduler, "_schedulers", [])
            yield scheduler


def storable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state, and those of inner ones, without the user's functions."""
    plain = {name: value for name, value in state.items() if name != "lr_lambdas" or _plain(value)}
    if "_schedulers" in plain:
        plain["_schedulers"] = [storable(inner) for inner in plain["_schedulers"]]
    return plain


def filled(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state, completed from the scheduler's own."""
    full = {**own, **saved}
    if "_schedulers" in full:
        pairs = zip(full["_schedulers"], own["_schedulers"], strict=True)
        full["_schedulers"] = [filled(inner, own_inner) for inner, own_inner in pairs]
    return full


def _plain(value: Any) -> bool:
    """Whether a checkpoint can hold it (it is read without running code)."""
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(item) for item in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def changed_groups(
    before: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
) -> tuple[list[str], list[float]]:
    """Apply the settings of the optimizers that differ from those of the checkpoint's run: the user
    has changed them.

    Returns:
        The changes in words, and the factor of each group's rate.
    """
    changes: dict[str, None] = {}
    factors = [1.0] * len(given)
    for i, (old, new, group) in enumerate(zip(before, given, groups, strict=False)):
        for name, value in new.items():
            if name not in old or old[name] == value or name == "param_names":
                continue
            changes[f"{name} {old[name]} -> {value}"] = None
            if name != "lr":
                group[name] = tuple(value) if isinstance(value, list) else value
            elif old[name]:
                factors[i] = value / old[name]
    return list(changes), factors
