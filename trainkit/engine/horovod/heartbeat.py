"""The heartbeat of a rank under Horovod: Horovod's own timeline, and in an elastic job the driver that watches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.horovod import timeline as horovod_timeline
from trainkit.launch.elastic.client import Membership


class HorovodHeartbeat(Heartbeat):
    """See the module.

    Args:
        membership: this process's link to an elastic driver, which holds step and progress; None outside such a job.
        compression: engine.compression, for a timeline.
    """

    def __init__(self, membership: Membership | None, compression: str) -> None:
        super().__init__(membership)
        self._membership, self._compression = membership, compression
        if membership is not None:
            membership.tensors = self.outstanding

    def watch(self, stall_s: float, on_dump: Callable[[], None]) -> bool:
        """See Heartbeat."""
        if self._membership is None:
            return False
        self._membership.stall_s, self._membership.on_dump = stall_s, on_dump
        return True

    def start_timeline(self, path: Path) -> str:
        """See Heartbeat."""
        super().start_timeline(path)
        return horovod_timeline.start(path)

    def stop_timeline(self) -> None:
        """See Heartbeat."""
        super().stop_timeline()
        horovod_timeline.stop()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """See Heartbeat."""
        return horovod_timeline.settings() | {"wire": self._compression}
