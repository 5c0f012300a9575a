"""What checkpoints hold of the settings of optimizers' groups and of schedulers."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.optim.forms import ScheduleConfig

# Absolute rates beside `lr` in a parameter group, which are scaled as it is: `initial_lr`, which is
# the user's `lr`, and the independent ones of schedulers.
OWN_RATES = ("max_lr", "min_lr", "swa_lr")
GROUP_RATES = ("initial_lr", *OWN_RATES)
# The same as attributes of schedulers: `base_lrs`, and the independent ones.
SCHEDULER_RATES = ("base_lrs", "min_lrs", "max_lrs", "eta_min")
# of a group: no settings of training
NO_SETTINGS = ("params", "fused", "foreach", "capturable", "differentiable")


def settings_of(group: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Return the plain settings of a group as the user gave them."""
    settings = {}
    for name, value in group.items():
        if name not in (*NO_SETTINGS, *GROUP_RATES) and is_plain(value):
            settings[name] = list(value) if isinstance(value, tuple) else value
    return settings | {"lr": lr}


def given_by(group: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """Return the settings and the rates of schedulers that a group has from the user."""
    rates = {name: group[name] for name in OWN_RATES if name in group and is_plain(group[name])}
    return settings_of(group, lr) | rates


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


def of_torch(schedules: Iterable[ScheduleConfig]) -> Iterator[LRScheduler]:
    """Yield the schedulers of torch, with those inside them."""
    return with_inner(config.scheduler for config in schedules if config.is_torchs)


def groups_of_others(schedules: Iterable[ScheduleConfig]) -> set[int]:
    """Return the ids of the groups of schedulers that are not torch's: they read the user's rates."""
    ids = set[int]()
    for config in schedules:
        if not config.is_torchs:
            ids.update(map(id, config.scheduler.optimizer.param_groups))
    return ids


@contextlib.contextmanager
def in_users_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """A context in which an optimizer's rates are without the factor: a scheduler that is not torch's
    computes in the user's.
    """
    _multiply(optimizer.param_groups, 1.0 / factor)
    try:
        yield
    finally:
        _multiply(optimizer.param_groups, factor)


def _multiply(groups: Iterable[dict[str, Any]], factor: float) -> None:
    for group in groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].detach().mul_(factor)
        else:
            group["lr"] *= factor


def storable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state, and those of inner ones, without the user's functions;
    numbers of numpy, which a function may return, are plain ones.
    """
    plain = {
        name: with_plain_numbers(value)
        for name, value in state.items()
        if name != "lr_lambdas" or is_plain(value)
    }
    if "_schedulers" in plain:
        plain["_schedulers"] = [storable(inner) for inner in plain["_schedulers"]]
    return plain


def with_plain_numbers(tree: Any) -> Any:
    """Return a tree of dicts, lists, tuples and sets with Python's numbers in place of numpy's."""
    if isinstance(tree, np.generic):
        return tree.item()
    if type(tree) in (dict, OrderedDict, Counter):
        plain = {with_plain_numbers(key): with_plain_numbers(value) for key, value in tree.items()}
        return type(tree)(plain)
    if type(tree) in (list, tuple, set):
        return type(tree)(map(with_plain_numbers, tree))
    return tree


def filled(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state, completed from the scheduler's own."""
    full = {**own, **saved}
    if "_schedulers" in full:
        pairs = zip(full["_schedulers"], own["_schedulers"], strict=True)
        full["_schedulers"] = [filled(inner, own_inner) for inner, own_inner in pairs]
    return full


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it (it is read without running code)."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def changed_groups(
    before: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    scales: Sequence[float],
) -> tuple[list[str], list[float], bool]:
    """Apply the settings of the optimizers that differ from those of the checkpoint's run: the user
    has changed them.

    Args:
        scales: lr_scaling's factor of each group's rates, but for `lr`.

    Returns:
        The changes in words; the factor of each group's rate; and whether a rate is among them.
    """
    changes: dict[str, None] = {}
    factors = [1.0] * len(given)
    has_rates = False
    for i, (old, new, group) in enumerate(zip(before, given, groups, strict=False)):
        for name, value in new.items():
            if name in OWN_RATES and old.get(name) != value:  # older checkpoints have none
                group[name] = value * scales[i]
            if name not in old or old[name] == value or name == "param_names":
                continue
            changes[f"{name} {old[name]} -> {value}"] = None
            if name in OWN_RATES:
                has_rates = True
            elif name != "lr":
                group[name] = tuple(value) if isinstance(value, list) else value
            elif old[name]:
                has_rates = True
                factors[i] = value / old[name]
    return list(changes), factors, has_rates
