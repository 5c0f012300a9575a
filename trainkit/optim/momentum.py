"""Momentum while a rate changes, in the form that is not corrected; see schedule.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit.errors import ConfigError
from trainkit.optim.forms import ScheduleConfig


class Momentum:
    """A group's momentum beside the one that was written into the group."""

    def __init__(self, value: float) -> None:
        self._value = self._written = value

    def apply(self, group: dict[str, Any], last: float) -> None:
        """Write the momentum for the group's rate after `last`;
        one that the user has set since is the momentum from now on.
        """
        if group["momentum"] != self._written:
            self._value = group["momentum"]
        group["momentum"] = self._written = (
            self._value * last / rate if (rate := float(group["lr"])) else self._value
        )

    def restore(self, group: dict[str, Any]) -> None:
        """Take what a checkpoint has written into the group."""
        self._written = group["momentum"]


def uncorrected(
    groups: Sequence[dict[str, Any]], schedules: Sequence[ScheduleConfig]
) -> list[Momentum]:
    """Return each group's momentum, for `momentum_correction=False`.

    Raises:
        ConfigError: there is no momentum, or a scheduler changes it too.
    """
    momenta = [float(group.get("momentum", 0.0)) for group in groups]
    cycled = any(getattr(config.scheduler, "cycle_momentum", False) for config in schedules)
    if cycled or not any(momenta):
        why = (
            "a scheduler moves the momentum itself (cycle_momentum)"
            if cycled
            else "no optimizer has a momentum"
        )
        raise ConfigError(f"trainer.lr_momentum_correction is false, but {why}. Leave it out.")
    return [Momentum(momentum) for momentum in momenta]
