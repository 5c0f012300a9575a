"""Horovod's own timeline, on each rank and at any time: an edit of Horovod's source that `trainkit horovod install` makes.

Stock Horovod writes one on rank 0 alone, and only if HOROVOD_TIMELINE=DYNAMIC was set at the launch.
"""

from __future__ import annotations

import os
from pathlib import Path

import horovod
import horovod.torch as hvd

_EDITED = "+trainkit." in horovod.__version__


def start(path: Path) -> str:
    """Make Horovod write into `path` from now on; return what is missing, and why, or ""."""
    if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
        return "Horovod's operations, since HOROVOD_TIMELINE (horovodrun --timeline-filename) has them written elsewhere"
    if not _EDITED and "HOROVOD_TIMELINE" not in os.environ:
        return "Horovod's operations, since this Horovod was not built by `python -m trainkit horovod install`"
    path.parent.mkdir(parents=True, exist_ok=True)
    hvd.start_timeline(str(path))
    return "" if _EDITED else "Horovod's operations of all ranks but 0: see `python -m trainkit horovod install`"


def stop() -> None:
    """Make Horovod close its file, if it writes one for us."""
    if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") == "DYNAMIC":
        hvd.stop_timeline()


def settings() -> dict[str, float]:
    """Return the cycle time (ms) and the fusion threshold (bytes) that Horovod started with, its defaults included."""
    cycle = float(os.environ.get("HOROVOD_CYCLE_TIME", "1.0"))
    return {"cycle_ms": cycle, "fusion_bytes": int(os.environ.get("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20)))}
