"""Durations as users write them: seconds, a timedelta, "HH:MM:SS" and "DD:HH:MM:SS", or a mapping as {hours: 2}."""

from __future__ import annotations

import re
from datetime import timedelta

from trainkit.errors import ConfigError

Duration = float | str | timedelta | dict[str, float]
LEGAL = "a number of seconds above 0, a timedelta, 'HH:MM:SS' or 'DD:HH:MM:SS', or a mapping as {days: 1, hours: 2}"
_UNITS = {"weeks", "days", "hours", "minutes", "seconds"}


def is_duration(value: object) -> bool:
    """Whether a value is one."""
    return _seconds(value) is not None


def seconds_of(value: Duration) -> float:
    """Return a duration's seconds.

    Raises:
        ConfigError: it is none.
    """
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigError(f"'{value}' is no duration; it must be {LEGAL}.")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, dict):
        if not value or not value.keys() <= _UNITS or not all(_is_part(part) for part in value.values()):
            return None
        value = timedelta(**value)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", value):
        seconds = 0.0
        for part, factor in zip(reversed(value.split(":")), (1, 60, 3600, 86400), strict=False):
            seconds += int(part) * factor
    else:
        return None
    return seconds if seconds > 0 else None


def _is_part(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
