"""Moments: the time between two of them."""

from __future__ import annotations

import pytest

from trainkit.launch.moments import Moment, boot_id


@pytest.mark.parametrize(
    ("later", "seconds"),
    [
        (Moment(1000.0, 15.0, "a"), 5.0),
        (Moment(-9000.0, 15.0, "a"), 5.0),  # the clock was put back
        (Moment(130.0, 2.0, "b"), 30.0),
        (Moment(130.0, 2.0, ""), 30.0),
        (Moment(50.0, 2.0, "b"), 0.0),
    ],
)
def test_time_of_one_boot_is_the_monotonic_clocks(later: Moment, seconds: float) -> None:
    """Of two boots it is the time of day's, which is never below 0."""
    assert later.seconds_since(Moment(100.0, 10.0, "a" if later.boot else "")) == seconds


def test_moments_of_this_process_follow_each_other() -> None:
    """Both have this host's boot."""
    first, second = Moment.now(), Moment.now()
    assert 0 <= second.seconds_since(first) < 60
    assert first.boot == second.boot == boot_id() != ""
