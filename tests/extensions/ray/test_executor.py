"""RayExecutor's settings, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.errors import ConfigError

executors = pytest.importorskip("trainkit.extensions.ray.executor")


@pytest.mark.parametrize(
    ("num_workers", "expected"), [(4, False), ((4, 4), True), ([2, 8], True), ((1, 1), True)]
)
def test_two_numbers_are_elastic(num_workers: Any, expected: bool) -> None:
    """Equal ones too, as Horovod's ElasticRayExecutor(4, 4): they were a fixed number, whose first
    loss ends all.
    """
    assert executors.RayExecutor(num_workers).is_elastic is expected


def test_max_failures_of_a_fixed_number_is_refused() -> None:
    """It had no effect: the first error ends the ranks. 0 is so; and a wrong value is named first."""
    with pytest.raises(ConfigError, match=r"max_failures is 3, .* Give num_workers=\(4, 4\)"):
        executors.RayExecutor(4, max_failures=3)
    assert executors.RayExecutor((4, 4), max_failures=3).options.max_failures == 3
    assert executors.RayExecutor(4, max_failures=0).options.max_failures == 0
    with pytest.raises(ConfigError, match="must be 0 or more"):
        executors.RayExecutor(4, max_failures=-1)
