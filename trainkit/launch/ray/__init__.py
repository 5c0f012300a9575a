"""Ranks on a Ray cluster: launcher=ray, and RayExecutor for functions. The only home of ray, but for its adapters.

options.py      what a user sets, checked; no ray
places.py       which bundle is slot 2 of a host; no ray
cluster.py      connects to a cluster, or starts one here
slots.py        placement groups -> hosts and their slots: the driver's HostSource
keeper.py       the actor of a slot: starts a worker as its child
backend.py      the driver's Backend: keepers
job.py          a command on the cluster, under the elastic driver (launch/elastic), run here
launcher.py     RayLauncher: options -> job.py; no ray until it runs
executor.py     RayExecutor: functions, in actors (actors.py), or, elastic, in workers of the driver (call.py)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.launch.ray.executor import RayExecutor as RayExecutor
    from trainkit.launch.ray.launcher import RayLauncher as RayLauncher


def __getattr__(name: str) -> Any:
    """Import what needs ray when it is first used: options are checked without it."""
    if name == "RayExecutor":
        return getattr(importlib.import_module("trainkit.launch.ray.executor"), name)
    if name == "RayLauncher":
        return getattr(importlib.import_module("trainkit.launch.ray.launcher"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
