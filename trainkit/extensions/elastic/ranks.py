"""Ranks of an elastic job: an elastic driver assigns them again while the process lives.

The launcher's driver gives a process its rank (client.py), in the environment. The engine connects
the ranks again for each generation: Horovod by the driver's server, torch's groups by a store of
the same server (store.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError
from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.network import worker_interface
from trainkit.launch.environment import Launcher, own_gpu


def elastic_ranks(launcher: Launcher) -> ElasticRanks:
    """Return the ranks of this process, which an elastic driver has started."""
    membership = Membership.current()
    assert membership is not None, "TRAINKIT_WORKER is set"
    return ElasticRanks(launcher, membership)


class ElasticRanks(Ranks):
    """Ranks that change.

    Attributes:
        requested_copies: see `copies`.
    """

    is_elastic = True
    _is_whole: ClassVar[bool] = True  # of this process's replica
    requested_copies: ClassVar[int] = 0  # of this process's fit; before it joins

    def __init__(self, launcher: Launcher, membership: Membership) -> None:
        super().__init__(launcher)
        self._membership = self.watcher = membership
        self._store: Any = None
        self.joins_late = os.environ.get("TRAINKIT_LATE") == "1"

    def join(self, process_set: Sequence[int] | None) -> None:
        """Wait for a place among the ranks of from now on, and write it into the environment, from
        which Horovod and read_launcher read it.

        Raises:
            ConfigError: a process set names ranks, or this host has no interface to the driver.
        """
        if process_set is not None:
            raise ConfigError(
                f"engine.process_set is {process_set}, and this job is elastic: ranks come and go."
                " Leave one out."
            )
        os.environ |= worker_interface(os.environ)
        is_first = not self._membership.generation
        assignment = self._membership.join(
            self.committed_step, self.replica_size, self._is_whole, self.copies
        )
        os.environ |= assignment.environment()
        if is_first:  # a spare may have been started with the first ranks, and get a rank later
            self.joins_late = assignment.generation > 1
            os.environ["TRAINKIT_LATE"] = "1" if self.joins_late else ""

    @property
    def gpu_index(self) -> int:
        """This process's GPU: local ranks change, but a process keeps its GPU."""
        own = own_gpu()
        return int(os.environ["TRAINKIT_SLOT"]) if own is None else own

    @property
    def copies(self) -> int:
        """See Ranks."""
        return ElasticRanks.requested_copies

    @property
    def first_world_size(self) -> int:
        """See Ranks."""
        return int(os.environ.get("TRAINKIT_NP", "0")) or self.world_size

    @property
    def max_world_size(self) -> int:
        """See Ranks."""
        return int(os.environ.get("TRAINKIT_MAX_RANKS", "0"))

    @property
    def min_world_size(self) -> int:
        """See Ranks."""
        return int(os.environ.get("TRAINKIT_MIN_RANKS", "1"))

    def lose_replica(self) -> None:
        """See Ranks."""
        ElasticRanks._is_whole = False

    @property
    def change_requested(self) -> bool:
        """See Ranks."""
        return self._membership.wanted

    def begin(self, stage: str) -> None:
        """See Ranks."""
        if (stage == "fit") == (self._membership.fits > 0):
            what = "a second fit" if stage == "fit" else f"{stage} before the fit"
            raise ConfigError(
                f"This job is elastic, and its script does {what}. A rank that comes later starts"
                " the script from its top, and would not find the others there: an elastic script"
                " has one fit, and begins with it. The rest is another job."
            )
        self._membership.fits += stage == "fit"
        self._membership.beat()

    def report_exception(self) -> None:
        """See Ranks."""
        self._membership.report_exception()

    def meeting_store(self) -> Any:
        """See Ranks."""
        from trainkit.extensions.elastic.store import DriverStore  # torch's

        if interface := os.environ.get("HOROVOD_GLOO_IFACE"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._store = DriverStore(self._membership)
        return self._store

    def end_meeting(self) -> None:
        """See Ranks."""
        if self._store is not None:
            self._store.close()
