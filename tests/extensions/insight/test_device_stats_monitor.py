"""DeviceStatsMonitor: a thread's readings of device and host are logged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import DeviceStatsMonitor
from trainkit.errors import ConfigError
from trainkit.extensions.insight import device_stats_monitor
from trainkit.extensions.insight.device_stats_monitor import Sampler


class Held:
    """Readings released by the test one by one."""

    def __init__(self, *readings: dict[str, float]) -> None:
        self._readings = iter(readings)
        self._done = threading.Event()
        self.at_end = threading.Event()

    def __call__(self) -> dict[str, float]:
        """Return the next one; after the last one, block until the test's end."""
        for reading in self._readings:
            return reading
        self.at_end.set()
        self._done.wait(10)
        return {}

    def end(self, sampler: Sampler) -> None:
        """Let the thread go."""
        self._done.set()
        sampler.stop()


def test_readings_become_one() -> None:
    """Means of ratios and watts, the maximum of all others;
    without a new reading the last result is returned again.
    """
    held = Held(
        {"a_ratio": 0.2, "b_bytes": 5.0, "c_watts": 100.0}, {"a_ratio": 0.4, "b_bytes": 3.0}
    )
    sampler = Sampler(held, 1e-6)
    assert held.at_end.wait(10)
    for _ in range(2):
        assert sampler.take() == {"a_ratio": pytest.approx(0.3), "b_bytes": 5.0, "c_watts": 100.0}
    held.end(sampler)
    assert not sampler._thread.is_alive()


def run(tmp_path: Path, monitor: DeviceStatsMonitor, *more: Callback) -> Written:
    """Train four steps; return the logged values."""
    written = Written("device/")
    quiet(tmp_path, callbacks=[monitor, written, *more], log_every_n_steps=2).fit(
        Line(), loader(16)
    )
    return written


class AwaitReading(Callback):
    """Holds the first step until a reading exists."""

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Wait for the thread."""
        monitor = next(c for c in trainer.callbacks if isinstance(c, DeviceStatsMonitor))
        while (
            monitor._sampler is not None
            and not monitor._sampler._held
            and not monitor._sampler._last
        ):
            monitor._sampler._thread.join(0.01)


def test_the_hosts_numbers_are_written_on_the_cpu(tmp_path: Path) -> None:
    """By default a CPU run logs memory and load of host and process,
    and leaves no thread running.
    """
    before = threading.active_count()
    written = run(tmp_path, DeviceStatsMonitor(), AwaitReading())
    assert [step for step, _ in written.rows] == [2, 4]
    values = written.rows[0][1]
    assert {
        "device/host_memory_used_bytes",
        "device/process_memory_bytes",
        "device/cpu_utilization_ratio",
    } <= values.keys()
    assert (
        0 <= values["device/cpu_utilization_ratio"] <= 1
        and values["device/process_memory_bytes"] > 1e6
    )
    assert threading.active_count() == before


def test_the_host_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the host's numbers a CPU has none, which is reported."""
    assert run(tmp_path, DeviceStatsMonitor(cpu_stats=False)).rows == []
    assert "nothing can be read here; it needs a GPU, or cpu_stats=true" in capsys.readouterr().out


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without psutil, the message names it."""
    monkeypatch.setattr(device_stats_monitor.DeviceStats, "read", lambda self: {})
    assert run(tmp_path, DeviceStatsMonitor()).rows == []
    assert "it needs psutil" in capsys.readouterr().out


def test_a_failed_run_leaves_no_thread(tmp_path: Path) -> None:
    """The thread ends with the run, however that ends."""

    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("the test says so")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the test says so"):
        quiet(tmp_path, callbacks=DeviceStatsMonitor()).fit(Fails(), loader(8))
    assert threading.active_count() == before


def test_illegal_arguments_are_refused() -> None:
    """An interval of 0 is refused: the thread would use a whole core."""
    with pytest.raises(
        ConfigError, match=r"callbacks\.device_stats\.sample_s is 0; it must be a number above 0"
    ):
        DeviceStatsMonitor(sample_s=0)
