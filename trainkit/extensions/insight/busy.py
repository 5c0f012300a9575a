"""A fit on a CPU that other programs use: torch's threads spin while they wait for each other
(trainkit/openmp.py), unless the environment says how they wait. A command sets it; a script of the
user's own has imported torch before it could.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from trainkit.api.view import RunView

_LOOKS, _APART_S = 3, 0.01


def spinning(run: RunView) -> Iterator[str]:
    """Yield what to set, if other programs run on all cores."""
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    if run.engine.device.type != "cpu" or torch.get_num_threads() == 1 or names & os.environ.keys():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores and os.getloadavg()[0] >= cores and _others() > 0:
        yield (
            f"Other programs use this machine (load {os.getloadavg()[0]:.1f}, {cores} cores). torch's"
            " threads, which spin while they wait for each other, make a fit several times slower"
            " there: start it with GOMP_SPINCOUNT=1000, as `python -m trainkit` does, or with"
            " OMP_NUM_THREADS=1."
        )


def _others() -> int:
    """Return how many other threads ran on this machine in each of some looks; 0 if unknown."""
    running = []
    for _ in range(_LOOKS):
        try:
            with open("/proc/loadavg") as file:
                running.append(int(file.read().split()[3].partition("/")[0]) - 1)
        except OSError:
            return 0
        time.sleep(_APART_S)
    return min(running)
