"""Units of FSDP2: dtypes, and errors within their forwards and backwards: which of them another
rank is to blame for.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainkit.engine.collectives import PeerError
from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.units import refuse_weights, reporting_peers
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


def test_weights_of_a_unit_have_one_dtype() -> None:
    """Of several units each its own; frozen ones, and those of other stages, do not count."""
    block, frozen = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).half().requires_grad_(False)
    model = nn.Sequential(block, nn.Linear(2, 2), frozen)
    refuse_weights(model, [block, model], set())
    refuse_weights(model, [model], set(block.parameters()))
    with pytest.raises(
        ConfigError, match=r"'0\.bias' is torch\.bfloat16, '1\.bias' is torch\.float32: weights"
    ):
        refuse_weights(model, [model], set())


def test_a_scalar_is_named() -> None:
    """As the temperature of a contrastive loss: torch's own error names no weight."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(ConfigError, match=r"'scale' is a scalar, .* nn\.Parameter\(torch\.zeros"):
        refuse_weights(model, [model[0], model], set())
    model.scale = nn.Parameter(torch.zeros(1))
    refuse_weights(model, [model[0], model], set())
