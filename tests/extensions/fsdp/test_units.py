"""Errors within FSDP2's forwards and backwards: which of them another rank is to blame for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainkit.engine.collectives import PeerError
from trainkit.engine.ranks import Ranks
from trainkit.extensions.fsdp.units import reporting_peers
from trainkit.launch.environment import read_launcher


class OfReplica(Ranks):
    """Note whether the replica is lost."""

    is_lost = False

    def lose_replica(self) -> None:
        """Note it."""
        self.is_lost = True


def fail(error: RuntimeError) -> None:
    """Fail as a forward of FSDP does."""
    raise error


def test_an_error_of_this_ranks_device_is_its_own() -> None:
    """It stays what it is, and the replica with it."""
    ranks = OfReplica(read_launcher())
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        reporting_peers(fail, ranks)(error)
    assert raised.value is error and not ranks.is_lost


def test_an_error_of_a_connection_ends_the_replica() -> None:
    """FSDP2 cannot leave a forward in its midst, and be used again."""
    ranks = OfReplica(read_launcher())
    error = dist.DistBackendError("NCCL error: remote process exited, NCCL 2.29.3")
    with pytest.raises(PeerError, match="Another rank ended"):
        reporting_peers(fail, ranks)(error)
    assert ranks.is_lost
