"""A resumed run whose schedulers were made otherwise: longer, since the run is, or with other
numbers.

What a scheduler was made with is compared with what this run has made; the differences are the
user's, and hold. The rate is then that of the new curve at the step reached, where the scheduler's
formula gives it.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from trainkit.optim.forms import ScheduleConfig
from trainkit.optim.scheduler_state import (
    OWN_RATES,
    SCHEDULER_RATES,
    filled,
    is_plain,
    storable,
    with_inner,
)

_PROGRESS = (
    "last_epoch",
    "_step_count",
    "_last_lr",
    "base_lrs",
    "_get_lr_called_within_step",
    "_is_initial",
)
# Their steps compute rates from `base_lrs` and their own; others' (StepLR) from the last rate.
_ABSOLUTE = (
    LambdaLR,
    OneCycleLR,
    CyclicLR,
    CosineAnnealingWarmRestarts,
)


def made(config: ScheduleConfig) -> dict[str, Any]:
    """Return what a scheduler was made with, its class and those inside it included, and when it
    steps.
    """
    state = storable(config.scheduler.state_dict())
    if config.is_torchs:
        about = _about(config.scheduler, state)
    else:
        about = {name: deepcopy(value) for name, value in state.items() if is_plain(value)}
    names = ("interval", "frequency", "monitor")
    return about | {name: getattr(config, name) for name in names}


def _about(scheduler: LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    parts = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ()), strict=True)
    inner = [_about(part, own) for part, own in parts]
    return state | {"class": type(scheduler).__name__} | ({"_schedulers": inner} if inner else {})


def changed_settings(made_before: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a scheduler was made with in this run,
    and not in the checkpoint's.
    """
    names = (
        name for name in made if name in made_before and name not in (*_PROGRESS, "_schedulers")
    )
    return {name: made[name] for name in names if made[name] != made_before[name]}


def with_changes(
    saved: Mapping[str, Any],
    made_before: Mapping[str, Any],
    made: Mapping[str, Any],
    factor: float,
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Return a saved state with the settings of this run, and the changes:
    name -> (before, now).

    Args:
        factor: of the rates in the saved state.
    """
    new = changed_settings(made_before, made)
    changes = {
        name: (made_before[name], value) for name, value in new.items() if not name.startswith("_")
    }
    state = dict(saved)
    for name in new.keys() & saved.keys():
        state[name] = _times(new[name], factor) if name in SCHEDULER_RATES else new[name]
    if "_schedulers" in state and len(state["_schedulers"]) == len(made.get("_schedulers", ())):
        inner = []
        parts = zip(
            state["_schedulers"], made_before["_schedulers"], made["_schedulers"], strict=True
        )
        for place, (saved_part, before_part, made_part) in enumerate(parts):
            part, more = with_changes(saved_part, before_part, made_part, factor)
            inner.append(part)
            changes |= {f"schedulers[{place}].{name}": change for name, change in more.items()}
        state["_schedulers"] = inner
    return state, changes


def _times(rate: Any, factor: float) -> Any:
    return [one * factor for one in rate] if isinstance(rate, (list, tuple)) else rate * factor


def has_own_rates(scheduler: LRScheduler) -> bool:
    """Whether a scheduler goes to a rate that is independent of the optimizer's."""
    for part in with_inner([scheduler]):
        if getattr(part, "max_lrs", None) or getattr(part, "eta_min", None):
            return True
    groups = scheduler.optimizer.param_groups
    return any(name in group for group in groups for name in OWN_RATES)


def rates_now(scheduler: LRScheduler) -> list[float] | None:
    """Return the rates that a scheduler's formula gives for the step it has reached;
    None if it only knows the next one.
    """
    if isinstance(scheduler, SequentialLR):
        return rates_now(_part_now(scheduler))
    if isinstance(scheduler, LambdaLR):
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        # a base that is a tensor is multiplied in its precision, as by torch
        return [float(base * factor(scheduler.last_epoch)) for base, factor in pairs]
    if isinstance(scheduler, _ABSOLUTE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # get_lr is called outside of step
            return [float(rate) for rate in scheduler.get_lr()]
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed is None else [float(rate) for rate in closed()]


def _part_now(scheduler: SequentialLR) -> LRScheduler:
    place = bisect_right(scheduler._milestones, scheduler.last_epoch)
    return scheduler._schedulers[place]


def has_overwritten(scheduler: LRScheduler) -> bool:
    """Whether a scheduler's last step wrote rates that are independent of those before it."""
    if isinstance(scheduler, ChainedScheduler):
        return any(map(has_overwritten, scheduler._schedulers))
    if isinstance(scheduler, SequentialLR):
        part = _part_now(scheduler)
        is_first = scheduler.last_epoch in scheduler._milestones
        if is_first and hasattr(part, "_get_closed_form_lr"):
            return True  # torch starts a part by its formula
        return has_overwritten(part)
    return isinstance(scheduler, _ABSOLUTE)


def restore(
    schedules: Sequence[ScheduleConfig],
    states: Sequence[Mapping[str, Any]],
    made_before: Sequence[Mapping[str, Any]],
    made: Sequence[Mapping[str, Any]],
    factor: float,
) -> tuple[list[str], list[LRScheduler]]:
    """Restore schedulers, with the settings that the user has changed since.

    Args:
        factor: of lr_scaling in the states.

    Returns:
        The changes in words; and the schedulers that were changed, or have functions of the user.
    """
    descriptions, moved = list[str](), list[LRScheduler]()
    for config, saved, before, own in zip(schedules, states, made_before, made, strict=True):
        scheduler = config.scheduler
        scale = factor if config.is_torchs else 1.0
        restored, changes = with_changes(saved, before, own, scale)
        scheduler.load_state_dict(filled(restored, scheduler.state_dict()))
        kind = type(scheduler).__name__
        for key, (old, new) in changes.items():
            descriptions.append(f"{kind}.{key} {old} -> {new}")
        if changes or isinstance(scheduler, LambdaLR):
            moved.append(scheduler)
    return descriptions, moved


def curves(
    schedules: Sequence[ScheduleConfig], moved: Sequence[LRScheduler]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the parameter groups whose rate is that of another curve, with the rate.

    Args:
        moved: the schedulers whose curve may be another.
    """
    owners = [config.scheduler.optimizer for config in schedules]
    for scheduler in moved:
        is_alone = sum(owner is scheduler.optimizer for owner in owners) == 1
        rates = rates_now(scheduler) if is_alone else None
        if rates is not None:
            # not those added since its last step
            groups = scheduler.optimizer.param_groups[: len(scheduler._last_lr)]
            yield from zip(groups, rates, strict=False)
