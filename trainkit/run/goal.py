"""What runs are compared by: a logged value, and whether its smallest or its largest is best.
Imports no torch.

A config asks for it: `optimized_metric`, or else what the first callback with a `monitor` monitors.
A sweep and a search leave it in <their run_dir>/sweep/goal.json, so that tables of their runs
compare them as they did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "sweep"  # below a sweep's run_dir: its goal, a note of each run, and Hydra's own files
FILE = "goal.json"
MODES = ("min", "max")


@dataclass(frozen=True)
class Goal:
    """What runs are compared by.

    Attributes:
        metric: a logged value, its last one; None if none is known.
        mode: "min" or "max": which of it is best; None if unknown.
        start: overrides by which a search starts its runs on several ranks, as launcher=ray.
    """

    metric: str | None = None
    mode: str | None = None
    start: tuple[str, ...] = ()


def goal_of_config(settings: Mapping[str, Any]) -> Goal:
    """Return what a config asks for; `settings` are flat, as {"callbacks.stop.monitor": ...}."""
    modes = monitored(settings)
    metric = settings.get("optimized_metric") or next(iter(modes), None)
    return Goal() if metric is None else Goal(str(metric), modes.get(str(metric)))


def monitored(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what callbacks of a flat config monitor, in their order: metric -> "min" or "max",
    or None for a mode of a user's own.
    """
    modes: dict[str, str | None] = {}
    for key, value in settings.items():
        if key.startswith("callbacks.") and key.endswith(".monitor") and value:
            mode = settings.get(f"{key.removesuffix('monitor')}mode") or "min"
            modes.setdefault(str(value), mode if mode in MODES else None)
    return modes


def write_goal(folder: Path, goal: Goal) -> None:
    """Leave it in the folder of a sweep or a search."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / FOLDER / FILE).write_text(json.dumps(asdict(goal)) + "\n")
