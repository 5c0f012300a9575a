"""Sections of the user's DeepSpeed config that name what the Task makes: optimizer and schedule.
Imports no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainkit.arguments import show
from trainkit.errors import ConfigError

# Of DeepSpeed's own Adam, which both types are: "Adam" too decouples its weight decay, unless it is
# asked not to (DeepSpeedEngine._configure_basic_optimizer).
_ADAMS = ("adam", "adamw")
_COUPLED = "adam_w_mode"
_OF_TORCH = "torch_adam"


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
    params = section.get("params") or {}
    is_adam = str(name).lower() in _ADAMS and own.lower() in _ADAMS
    if is_adam:
        _check_adam(str(name), params, optimizer)
    elif name != "auto" and str(name).lower() != own.lower():
        raise ConfigError(_differ("optimizer.type", name, f"the Task's optimizer is {own}"))
    for key, value in params.items():
        if value is None or value == "auto" or (is_adam and key in (_COUPLED, _OF_TORCH)):
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


def _check_adam(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Compare how DeepSpeed's Adam of these settings decays weights with the Task's Adam or AdamW.

    Raises:
        ConfigError: they differ.
    """
    own = type(optimizer).__name__
    decay = optimizer.defaults["weight_decay"]
    is_coupled = name.lower() == "adam" and params.get(_COUPLED) is False
    if is_coupled != (own == "Adam") and decay:
        meant = "Adam" if is_coupled else "AdamW"
        raise ConfigError(
            f"engine.config's optimizer.type is {show(name)}, which DeepSpeed computes as {meant}"
            f" (its {_COUPLED} is {show(params.get(_COUPLED, True))}), but the Task's optimizer is"
            f" {own} with a weight_decay of {show(decay)}: two sources of one value. Make the"
            f" Task's {meant}, or set optimizer.type to 'auto' in engine.config."
        )
    if decay and "weight_decay" not in params and not params.get(_OF_TORCH):
        raise ConfigError(
            "engine.config's optimizer.params has no weight_decay, which is 0 in DeepSpeed, but"
            f" weight_decay of the Task's {own} is {show(decay)}: two sources of one value. Make"
            " them equal, or set it to 'auto' in engine.config."
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
