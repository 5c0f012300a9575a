"""Sections of the user's DeepSpeed config that name what the Task makes: optimizer and schedule.
Imports no DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import torch

from trainkit.arguments import show
from trainkit.errors import ConfigError


def check_optimizer(section: Any, optimizer: torch.optim.Optimizer) -> None:
    """Compare the section `optimizer` with the Task's optimizer, which is the one that trains.

    Raises:
        ConfigError: they differ.
    """
    if section is None or section == "auto":
        return
    if not isinstance(section, dict):
        raise ConfigError(f"engine.config's optimizer is {show(section)}; it must be a mapping.")
    name = section.get("type", "auto")
    own = type(optimizer).__name__
    if name != "auto" and str(name).lower() != own.lower():
        raise ConfigError(_differ("optimizer.type", name, f"the Task's optimizer is {own}"))
    for key, value in (section.get("params") or {}).items():
        if value is None or value == "auto":
            continue
        if key not in optimizer.defaults:
            raise ConfigError(
                f"engine.config's optimizer.params.{key} is {show(value)}, but the Task's {own} has"
                " no such setting. Leave it out."
            )
        theirs = _plain(value)
        ours = _plain(optimizer.defaults[key])
        if theirs != ours:
            raise ConfigError(
                _differ(
                    f"optimizer.params.{key}", value, f"{key} of the Task's {own} is {show(ours)}"
                )
            )


def check_scheduler(section: Any) -> None:
    """Refuse the section `scheduler`: the rates are those of trainkit's schedule, and there would
    be two.

    Raises:
        ConfigError: it names one.
    """
    if section is None or section == "auto":
        return
    name = section.get("type") if isinstance(section, dict) else section
    raise ConfigError(
        f"engine.config's scheduler is {show(name)}, but the rates are those of the Task's schedule"
        " (lr=...): two sources of one value. Leave scheduler out of engine.config."
    )


def _differ(place: str, theirs: Any, ours: str) -> str:
    return (
        f"engine.config's {place} is {show(theirs)}, but {ours}: two sources of one value. Make"
        " them equal, or set it to 'auto' in engine.config."
    )


def _plain(value: Any) -> Any:
    """Return numbers as floats, and sequences as lists:
    0.9 in JSON is 0.9 in Python, (0.9, 0.95) is [0.9, 0.95].
    """
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
