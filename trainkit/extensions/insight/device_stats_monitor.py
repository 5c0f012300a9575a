"""DeviceStatsMonitor: logs memory, load, temperature and power of rank 0's device and host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked
from trainkit.device.accelerator import has_streams
from trainkit.extensions.insight.device_stats import DeviceStats
from trainkit.extensions.insight.log_steps import is_log_step, write
from trainkit.safety.threads import printed, start_thread

_OF_HOST = ("cpu_", "host_", "process_")
_MEANS = ("_ratio", "_watts")  # these fluctuate: their mean says more than their maximum


_FIRST_S = 0.5


class Sampler:
    """Calls `read` in a thread each `every_s` seconds,
    so that training never waits for a driver.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._held: list[Mapping[str, float]] = []
        self._last: dict[str, float] = {}
        self._thread = start_thread(
            "device stats", self._work, printed("device/... stay as they are; training continues.")
        )

    def take(self) -> dict[str, float]:
        """Return the readings since the last call as one: the mean of ratios and watts, the maximum
        of all others.

        Without a new reading the last result is returned again; before the first reading the result
        is empty.
        """
        with self._lock:
            held = self._held
            self._held = []
        if held:
            names = dict.fromkeys(name for reading in held for name in reading)
            self._last = {
                name: _joined(name, [reading[name] for reading in held if name in reading])
                for name in names
            }
        return dict(self._last)

    def stop(self) -> None:
        """End the thread after its current reading."""
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        # a load needs an interval to be measured over
        if self._stopped.wait(min(_FIRST_S, self._every_s)):
            return
        while True:
            reading = self._read()
            with self._lock:
                self._held.append(reading)
            if self._stopped.wait(self._every_s):
                return


def _joined(name: str, values: list[float]) -> float:
    return sum(values) / len(values) if name.endswith(_MEANS) else max(values)


@checked
class DeviceStatsMonitor(Callback):
    """Logs `device/...` of rank 0's device and host every log_every_n_steps.

    The numbers are those of trainkit.extensions.insight.device_stats (`gpu_memory_used_bytes`,
    `gpu_utilization_ratio`, `gpu_power_watts`, `host_memory_used_bytes`, ...; GPUs need
    nvidia-ml-py, hosts psutil) and, on a GPU, torch's `gpu_memory_peak_bytes` and
    `gpu_alloc_retries` (each retry freed torch's cache and waited: memory is short). A thread reads
    them, because a driver call may take milliseconds. Logged are the mean of ratios and watts and
    the maximum of all others since the last log step.

    Args:
        cpu_stats: log the host's and the process's numbers too. Default: only if the device is the
            CPU.
        sample_s: seconds between two readings.
    """

    config_key = "callbacks.device_stats"
    may_differ = True

    def __init__(self, cpu_stats: bool | None = None, sample_s: PositiveFloat = 1.0) -> None:
        self.cpu_stats = cpu_stats
        self.sample_s = sample_s
        self._sampler: Sampler | None = None

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        if not trainer.is_global_zero:
            return
        device = trainer.engine.device
        stats = DeviceStats(device)
        with_host = device.type == "cpu" if self.cpu_stats is None else self.cpu_stats

        def read() -> dict[str, float]:
            values = stats.read() | _of_allocator(device)
            return {
                name: value
                for name, value in values.items()
                if with_host or not name.startswith(_OF_HOST)
            }

        if not read():
            what = (
                "nvidia-ml-py"
                if device.type == "cuda"
                else "psutil"
                if with_host
                else "a GPU, or cpu_stats=true"
            )
            trainer.say(f"callbacks.device_stats: nothing can be read here; it needs {what}.")
            return
        self._sampler = Sampler(read, self.sample_s)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if self._sampler is not None and is_log_step(trainer):
            write(
                trainer, {f"device/{name}": value for name, value in self._sampler.take().items()}
            )

    def _stop(self, *_: Any, **__: Any) -> None:
        sampler = self._sampler
        self._sampler = None
        if sampler is not None:
            sampler.stop()

    on_train_end = on_exception = teardown = _stop


def _of_allocator(device: torch.device) -> dict[str, float]:
    if not has_streams(device):
        return {}
    stats = torch.get_device_module(device).memory_stats(device)
    return {
        "gpu_memory_peak_bytes": float(stats.get("allocated_bytes.all.peak", 0)),
        "gpu_alloc_retries": float(stats.get("num_alloc_retries", 0)),
    }
