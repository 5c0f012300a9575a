"""The Horovod engine's seat in an elastic job: ranks that are formed anew while the process lives.

The launcher's driver gives a process its rank (membership.py); Horovod reads it from the environment when it starts, and is
shut down before the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import horovod.torch as hvd

from trainkit.engine.base import Device, Engine
from trainkit.errors import ConfigError
from trainkit.launch.elastic.client import Membership
from trainkit.launch.environment import read_launcher


class SeatedEngine(Engine):
    """The elastic half of HorovodEngine; outside of an elastic job it does nothing."""

    def __init__(self, device: Device = "auto") -> None:
        """Look whether there is such a job."""
        super().__init__(device)
        self._membership = Membership.current()
        if self._membership is not None:
            self.is_elastic, self.whereabouts = True, self._membership
            self._membership.tensors = self.outstanding
            self.comes_late = os.environ.get("TRAINKIT_LATE") == "1"

    def _take_seat(self, process_set: Sequence[int] | None) -> None:
        """Wait for a place among the ranks that there are from now on.

        Raises:
            ConfigError: the job is elastic, and a process set names ranks.
        """
        if self._membership is None:
            return
        if process_set is not None:
            raise ConfigError(
                f"engine.process_set is {process_set}, and this job is elastic: ranks come and go. Leave one out."
            )
        os.environ |= self._membership.join(self.kept_step).environment()
        self.launcher = read_launcher()

    @property
    def first_ranks(self) -> int:
        """See Engine."""
        return int(os.environ.get("TRAINKIT_NP", "0")) or self.world_size

    @property
    def most_ranks(self) -> int:
        """See Engine."""
        return self.world_size if self._membership is None else int(os.environ.get("TRAINKIT_MAX_RANKS", "0"))

    @property
    def ranks_change(self) -> bool:
        """See Engine."""
        return self._membership is not None and self._membership.wanted

    def begin(self, stage: str) -> None:
        """See Engine."""
        if self._membership is None:
            return
        if (stage == "fit") == (self._membership.fits > 0):
            what = "a second fit" if stage == "fit" else f"{stage} before the fit"
            raise ConfigError(
                f"This job is elastic, and its script does {what}. A rank that comes later starts the script from its top, and "
                "would not find the others there: an elastic script has one fit, and begins with it. The rest is another job."
            )
        self._membership.fits += stage == "fit"
        self._membership.beat()

    def leave(self) -> None:
        """See Engine."""
        self.release()
        hvd.shutdown()

    def watch(self, stall_s: float, on_dump: Callable[[], None]) -> bool:
        """See Engine."""
        if self._membership is None:
            return False
        self._membership.stall_s, self._membership.on_dump = stall_s, on_dump
        return True

    @property
    def _gpu_number(self) -> int:
        # Where ranks are formed anew local ranks are, too, but a process keeps its GPU.
        return self.local_rank if self._membership is None else int(os.environ["TRAINKIT_SLOT"])
