"""The heartbeat of a rank under Horovod: with Horovod's own timeline.

On each rank and at any time, the timeline is an edit of Horovod's source that `trainkit horovod
install` makes. Stock Horovod writes one on rank 0 alone, and only if HOROVOD_TIMELINE=DYNAMIC was
set at the launch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd

from trainkit.engine.heartbeat import Heartbeat, Watcher

_EDITED = "+trainkit." in horovod.__version__


class HorovodHeartbeat(Heartbeat):
    """See the module.

    Args:
        watcher: the launcher that watches this process, as an elastic driver; None if it does not.
        compression: engine.compression, for a timeline.
    """

    def __init__(self, watcher: Watcher | None, compression: str) -> None:
        super().__init__(watcher)
        self._compression = compression

    def start_timeline(self, path: Path) -> str:
        """See Heartbeat."""
        super().start_timeline(path)
        if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") != "DYNAMIC":
            return (
                "Horovod's operations, since HOROVOD_TIMELINE (horovodrun --timeline-filename) has"
                " them written elsewhere"
            )
        if not _EDITED and "HOROVOD_TIMELINE" not in os.environ:
            return (
                "Horovod's operations, since this Horovod was not built by `python -m trainkit"
                " horovod install`"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        hvd.start_timeline(str(path))
        return (
            ""
            if _EDITED
            else "Horovod's operations of all ranks but 0: see `python -m trainkit horovod install`"
        )

    def stop_timeline(self) -> None:
        """See Heartbeat."""
        super().stop_timeline()
        if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") == "DYNAMIC":
            hvd.stop_timeline()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """See Heartbeat; Horovod's settings are those that it started with,
        its defaults included.
        """
        fusion = int(os.environ.get("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20)))
        return {
            "cycle_ms": float(os.environ.get("HOROVOD_CYCLE_TIME", "1.0")),
            "fusion_bytes": fusion,
            "wire": self._compression,
        }
