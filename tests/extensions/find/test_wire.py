"""find settings: which settings are worth a try,
and which of those that were tried is suggested.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainkit.config import compose
from trainkit.errors import ConfigError
from trainkit.extensions.find import wire
from trainkit.extensions.find.command import _wire_row
from trainkit.extensions.find.wire import Setting, WireSettings, find_settings
from trainkit.extensions.script.subject import ConfigSubject


def found(
    *tried: tuple[dict[str, Any], float], engine: str = "horovod", mib: int = 40, tensors: int = 30
) -> WireSettings:
    """Return a result with these settings and step times."""
    settings = [Setting(options, step_s) for options, step_s in tried] or [Setting({})]
    return WireSettings(engine, 2, mib * 2**20, tensors, False, settings)


def test_the_fastest_is_suggested_if_it_gains() -> None:
    """More than 3 % of the config's own step;
    what rounds gradients is compared with the fastest that does not.
    """
    groups, rounded = {"num_groups": 4}, {"num_groups": 4, "compression": "fp16"}
    seen = found(({}, 1.0), (groups, 0.9), ({"num_groups": 1}, 1.2), (rounded, 0.5))
    best, other = seen.faster(exact=True), seen.faster(exact=False)
    assert best is not None and best.options == groups
    assert other is not None and other.options == rounded
    seen = found(({}, 1.0), (groups, 0.98), (rounded, 0.98))
    assert seen.faster(exact=True) is None and seen.faster(exact=False) is None
    seen = found(({}, 1.0), (groups, math.inf))
    assert seen.faster(exact=True) is None and seen.faster(exact=False) is None


@pytest.mark.parametrize(("rounds", "shown"), [(False, "exact"), (True, "rounded")])
def test_gradients_of_the_configs_own_compression_are_rounded(rounds: bool, shown: str) -> None:
    """engine.compression=fp16 of the config is in each row; another setting leaves it as it is."""
    seen = found(({}, 1.0), ({"num_groups": 4}, 0.9))
    seen.rounds = rounds
    assert [_wire_row(one, "", seen)[-1] for one in seen.tried] == [shown] * 2
    assert seen.faster(exact=True) == seen.tried[1]


@pytest.mark.parametrize(
    ("option", "value", "own", "differs"),
    [
        ("num_groups", 4, None, True),
        ("num_groups", 4, 4, False),
        ("num_groups", 30, None, False),  # a group a tensor
        ("cycle_time_ms", 1, None, False),  # Horovod's own on the CPU
        ("cycle_time_ms", 1, 5, True),
        # 40 MiB of gradients, and 128 by default: one sum in both cases
        ("fusion_threshold_mb", 64, None, False),
        ("fusion_threshold_mb", 16, None, True),
        ("bucket_cap_mb", 25.0, None, False),
        ("bucket_cap_mb", 100.0, None, True),
        ("bucket_cap_mb", 100.0, 50.0, False),
    ],
)
def test_only_what_changes_the_job_is_tried(
    option: str, value: float, own: float | None, differs: bool
) -> None:
    """A value that is the config's, or that makes the same sums, costs no trial."""
    assert wire._differs(option, value, own, found()) == differs


def test_one_rank_has_no_wire() -> None:
    """It is refused, with how to start several."""
    jobs: list[Any] = []
    compose.run("find", ["conf=mlp"], True, jobs.append)
    with pytest.raises(ConfigError, match="One rank sends no gradients"):
        find_settings(ConfigSubject(jobs[0], ["conf=mlp"]))
