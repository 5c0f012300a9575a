"""torch.distributed's errors: which of them another rank is to blame for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainkit.engine.collectives import PeerError
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.launch.environment import Launcher

NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.3\n"
OWN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
    dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 2 'out of memory'"),
    dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 710 'device-side assert triggered'"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.29.3\nncclInvalidUsage:"
        " This usually reflects invalid usage of NCCL library.\nDuplicate GPU detected"
    ),
]
OF_PEERS = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:41"),
    RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:456] preamble.nbytes. 20 vs 4"),
    dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, remote process exited, NCCL 2.29.3"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistNetworkError("Connection was likely closed. Did the remote server shutdown?"),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0"),
]


def alone() -> DDPCollectives:
    """Collectives that have met no other rank."""
    return DDPCollectives(Ranks(Launcher("none", 0, 1, 0, 1)), Heartbeat())


@pytest.mark.parametrize("error", OWN, ids=lambda error: str(error)[-24:])
def test_what_this_ranks_device_reports_in_a_collective_is_its_own(error: RuntimeError) -> None:
    """Out of memory, a failed assertion of a kernel, a misuse of NCCL and a bug stay what they are:
    other ranks would look for one that has ended, and halving and capsules would not see it.
    """
    with pytest.raises(type(error)) as raised, alone().waiting_for("the sums of gradients"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", OF_PEERS, ids=lambda error: str(error)[:24])
def test_what_the_connections_report_is_a_peers(error: RuntimeError) -> None:
    """Errors of Gloo, of NCCL's communicators and of torch's store say that another rank ended."""
    with pytest.raises(PeerError, match="Another rank ended"), alone().waiting_for("a sum"):
        raise error
