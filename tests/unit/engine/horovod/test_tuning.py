"""Horovod's own settings become variables before it starts."""

from __future__ import annotations

import pytest

from trainkit.engine.horovod.tuning import Tuning
from trainkit.errors import ConfigError, EngineError


def test_each_setting_is_the_variable_that_horovod_reads() -> None:
    """Megabytes become bytes; unset options are left to Horovod."""
    environ: dict[str, str] = {}
    assert Tuning(0.5, 2.5, 0, True, "log.csv").apply(environ, runs_already=False) == []
    assert environ == {
        "HOROVOD_FUSION_THRESHOLD": "524288",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "log.csv",
    }
    assert Tuning().variables() == {}


def test_the_users_variable_wins_and_that_is_said() -> None:
    """A variable that is set stays, with a sentence; one of the same value without."""
    environ = {"HOROVOD_CYCLE_TIME": "3", "HOROVOD_CACHE_CAPACITY": "7"}
    said = Tuning(cycle_time_ms=1, cache_capacity=7).apply(environ, runs_already=False)
    assert said == [
        "engine.cycle_time_ms is 1, but HOROVOD_CYCLE_TIME=3 is set in the environment, and wins."
    ]
    assert environ == {"HOROVOD_CYCLE_TIME": "3", "HOROVOD_CACHE_CAPACITY": "7"}


def test_horovod_reads_them_once() -> None:
    """Once it runs, another value would have no effect and is refused; the same value is fine."""
    environ = {"HOROVOD_FUSION_THRESHOLD": str(2**20)}
    assert Tuning(fusion_threshold_mb=1).apply(environ, runs_already=True) == []
    with pytest.raises(
        EngineError,
        match=r"engine\.fusion_threshold_mb is 2, but Horovod runs .*=1048576\) and reads",
    ):
        Tuning(fusion_threshold_mb=2).apply(environ, runs_already=True)
    with pytest.raises(
        EngineError, match=r"engine\.autotune is true, but .*HOROVOD_AUTOTUNE=not set"
    ):
        Tuning(autotune=True).apply(environ, runs_already=True)


def test_a_log_of_no_tuning_is_refused() -> None:
    """autotune_log_file alone would have no effect."""
    with pytest.raises(
        ConfigError, match=r"engine\.autotune_log_file is 'a\.csv', but engine\.autotune is false"
    ):
        Tuning(autotune_log_file="a.csv")
