"""Durations as users write them."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from trainkit.arguments import is_duration, seconds_of
from trainkit.errors import ConfigError

GOOD: list[tuple[Any, float]] = [
    (1, 1.0),
    (0.25, 0.25),
    (timedelta(minutes=2), 120.0),
    ("00:00:01", 1.0),
    ("00:30:00", 1800.0),
    ("0:5:7", 307.0),
    ("100:00:00", 360_000.0),
    ("01:02:03:04", 93_784.0),
    ("10:00:00:00", 864_000.0),
    ({"days": 1, "hours": 2}, 93_600.0),
    ({"minutes": 0.5}, 30.0),
]
BAD: list[Any] = [
    0,
    -1,
    0.0,
    True,
    None,
    math.nan,
    "",
    "30",
    "5:00",
    "00:00:00",
    "00:60:00",
    "00:00:60",
    "-1:00:00",
    "1:2:3:4:5",
    "00:00:01 ",
    "1h",
    "one",
    timedelta(0),
    timedelta(seconds=-3),
    [1],
    {},
    {"hours": 0},
    {"hours": -1, "days": 1},
    {"hours": True},
    {"hours": "1"},
    {"hours": math.nan},
    {"hours": 1e300},
    {"years": 1},
    {1: 1},
]


@pytest.mark.parametrize(("written", "seconds"), GOOD, ids=[str(written) for written, _ in GOOD])
def test_a_duration_is_read(written: Any, seconds: float) -> None:
    """Seconds, a timedelta, HH:MM:SS, DD:HH:MM:SS and a mapping of units are read."""
    assert is_duration(written)
    assert seconds_of(written) == seconds


@pytest.mark.parametrize("written", BAD, ids=[repr(written) for written in BAD])
def test_anything_else_is_refused(written: Any) -> None:
    """A value that is no duration above 0 is refused; the error names it, and the legal ones."""
    assert not is_duration(written)
    with pytest.raises(ConfigError) as caught:
        seconds_of(written)
    assert str(caught.value).startswith(
        f"'{written}' is no duration; it must be a number of seconds above 0, a timedelta,"
    )
