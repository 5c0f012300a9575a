"""Insight: callbacks that say what a model is made of, where time goes, which rank is slow or
hangs, and what gradients, rates and devices do.

watchdog/                 names a rank that hangs, and ends the job
goodput.py                the share of the time that trained (docs/elastic.md)
stragglers.py             names ranks that are slower than the others
throughput.py             samples a second, FLOPs, share of the device's peak (peak_flops.py)
model_summary/            the layers, their parameters, output shapes and FLOPs
gradient_monitor.py       norms and zeros of gradients
learning_rate_monitor.py  the rate of each group of weights, under Lightning's names
device_stats_monitor.py   memory, use and power of devices (device_stats.py)
busy.py                   a line of a fit on a CPU that other programs use
"""

from trainkit.extension import Extension

_ROOM = "trainkit.extensions.insight"
_HOMES = {
    "Watchdog": "watchdog.watchdog",
    "Goodput": "goodput",
    "Stragglers": "stragglers",
    "ThroughputMonitor": "throughput",
    "GradientMonitor": "gradient_monitor",
    "LearningRateMonitor": "learning_rate_monitor",
    "DeviceStatsMonitor": "device_stats_monitor",
    "ModelSummary": "model_summary.model_summary",
}

EXTENSION = Extension(
    name="insight",
    summary=(
        "callbacks=watchdog, goodput, stragglers, throughput, gradients, learning_rate, device_stats:"
        " where time goes, and who is slow"
    ),
    proven="each commit; figures of a GPU not yet",
    targets=tuple(f"{_ROOM}.{home}.{name}" for name, home in _HOMES.items()),
    names={f"trainkit.callbacks.{name}": f"{_ROOM}.{home}.{name}" for name, home in _HOMES.items()}
    | {
        f"trainkit.callbacks.{home}.{name}": f"{_ROOM}.{home}.{name}"
        for name, home in _HOMES.items()
    },
    remarks=(f"{_ROOM}.busy.spinning",),
)
