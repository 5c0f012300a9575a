"""Series: the numbers that a scrape reads. Training stores plain numbers; the scrape assembles them
in its own thread.

SERIES holds names and meanings; the dashboard and the alerts in trainkit/loggers/dashboards/ use
them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Literal

from trainkit.extensions.insight.device_stats import DeviceStats

Kind = Literal["gauge", "counter", "histogram"]

# name -> (kind, labels beside run, rank and host, meaning)
SERIES: dict[str, tuple[Kind, tuple[str, ...], str]] = {
    "trainkit_info": (
        "gauge",
        ("version", "task", "engine", "world_size"),
        "1; its labels describe the run.",
    ),
    "trainkit_global_step": ("gauge", (), "Optimizer steps of the run."),
    "trainkit_planned_steps": (
        "gauge",
        (),
        "Optimizer steps at which the run ends; absent if unknown.",
    ),
    "trainkit_epoch": ("gauge", (), "The current epoch, from 0."),
    "trainkit_restarts": (
        "gauge",
        (),
        "Number of times the run was resumed or its ranks were formed again; of rank 0.",
    ),
    "trainkit_steps_total": ("counter", (), "Optimizer steps of this process."),
    "trainkit_samples_total": ("counter", (), "Samples of all ranks in the steps of this process."),
    "trainkit_step_seconds": ("histogram", (), "Seconds of a step, by the host's clock."),
    "trainkit_samples_per_second": (
        "gauge",
        (),
        "Samples of all ranks, in the steps between the last two logs.",
    ),
    "trainkit_step_share_ratio": (
        "gauge",
        ("part",),
        (
            "The share of a step's time, 0 to 1: data (waiting for data), compute, communication,"
            " optimizer, hooks."
        ),
    ),
    "trainkit_last_step_timestamp_seconds": (
        "gauge",
        (),
        "When the last step ended, in seconds since 1970.",
    ),
    "trainkit_last_progress_timestamp_seconds": (
        "gauge",
        (),
        "When the last step or validation batch ended.",
    ),
    "trainkit_loss": ("gauge", (), "The last logged training loss; of rank 0."),
    "trainkit_metric": ("gauge", ("name",), "The last logged value of each name; of rank 0."),
    "trainkit_nonfinite_values_total": (
        "counter",
        (),
        "Logged values that were NaN or infinite; of rank 0.",
    ),
    "trainkit_gpu_memory_used_bytes": (
        "gauge",
        ("gpu",),
        "Of a GPU of this host, including other processes; gpu is torch's index.",
    ),
    "trainkit_gpu_memory_total_bytes": ("gauge", ("gpu",), "Of a GPU."),
    "trainkit_gpu_memory_allocated_bytes": (
        "gauge",
        ("gpu",),
        "By tensors of the exporting process, on its own GPU.",
    ),
    "trainkit_gpu_memory_reserved_bytes": (
        "gauge",
        ("gpu",),
        "By torch in the exporting process, on its own GPU.",
    ),
    "trainkit_gpu_utilization_ratio": (
        "gauge",
        ("gpu",),
        "0 to 1: the share of time in which it was busy.",
    ),
    "trainkit_gpu_temperature_celsius": ("gauge", ("gpu",), "Of a GPU."),
    "trainkit_gpu_power_watts": ("gauge", ("gpu",), "Of a GPU."),
    "trainkit_host_memory_used_bytes": ("gauge", (), "Of the host."),
    "trainkit_host_memory_total_bytes": ("gauge", (), "Of the host."),
    "trainkit_process_memory_bytes": ("gauge", (), "Of this process."),
    "trainkit_cpu_utilization_ratio": ("gauge", (), "0 to 1: of all cores of the host."),
}
BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass
class Board:
    """The numbers of this process. Each field is written by one thread; a scrape may read fields a
    step apart.

    Attributes:
        about: labels of trainkit_info.
        gpus: readers of the host's GPUs, by index; the first rank of a host reads all.
        host: reader of the host's memory and load.
        loss_name: name of the logged value that is the loss.
        numbers: the series with a single value, by name.
        shares: part of a step -> its share of the time.
        metrics: name of a logged value -> the value.
    """

    about: dict[str, str]
    gpus: dict[str, DeviceStats]
    host: DeviceStats
    loss_name: str
    numbers: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0
        counters = (
            "trainkit_steps_total",
            "trainkit_samples_total",
            "trainkit_nonfinite_values_total",
        )
        self.numbers |= dict.fromkeys(counters, 0.0)
        self.get_on()

    def get_on(self) -> None:
        """Record that the run makes progress."""
        self.numbers["trainkit_last_progress_timestamp_seconds"] = time.time()

    def take_step(self, seconds: float, samples: int, step: int, epoch: int) -> None:
        """Record a step: its duration and samples, and the run's position after it."""
        self._buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds
        numbers = self.numbers
        numbers["trainkit_steps_total"] += 1
        numbers["trainkit_samples_total"] += samples
        numbers["trainkit_global_step"], numbers["trainkit_epoch"] = step, epoch
        now = time.time()
        numbers["trainkit_last_step_timestamp_seconds"] = numbers[
            "trainkit_last_progress_timestamp_seconds"
        ] = now

    def take_metrics(self, metrics: dict[str, float]) -> None:
        """Record logged values."""
        # a new dict: a scrape may be iterating over the old one
        self.metrics = self.metrics | metrics
        self.numbers["trainkit_nonfinite_values_total"] += sum(
            not math.isfinite(value) for value in metrics.values()
        )
        # with this suffix if it is logged by epoch too
        for name in (self.loss_name, f"{self.loss_name}_step"):
            if name in metrics:
                self.numbers["trainkit_loss"] = metrics[name]

    def histogram(self) -> tuple[list[tuple[str, float]], float]:
        """Return trainkit_step_seconds:
        (upper bound, steps up to it) of each bucket, and the sum of seconds.
        """
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        return (
            list(zip(bounds, map(float, itertools.accumulate(self._buckets)), strict=True)),
            self._sum_s,
        )

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return all other series: name -> label values, as in SERIES -> value."""
        plain = self.numbers | {
            f"trainkit_{name}": value for name, value in self.host.of_host().items()
        }
        series: dict[str, dict[tuple[str, ...], float]] = {
            name: {(): plain[name]} for name in SERIES if name in plain
        }
        series["trainkit_info"] = {tuple(self.about.values()): 1.0}
        series["trainkit_step_share_ratio"] = {
            (part,): share for part, share in self.shares.items()
        }
        for number, stats in self.gpus.items():
            for name, value in stats.of_gpu().items():
                series.setdefault(f"trainkit_{name}", {})[number,] = value
        series["trainkit_metric"] = {(name,): value for name, value in self.metrics.items()}
        return series
