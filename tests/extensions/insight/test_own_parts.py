"""FLOPs of what ranks share: those of this rank's part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.extensions.insight.model_summary.layers import flop_counter
from trainkit.extensions.insight.own_parts import OwnParts
from trainkit.extensions.pipeline.placeholder import placeholder


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of 2, alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def counted(net: nn.Module, x: Tensor) -> int:
    """Return the FLOPs of forward and backward."""
    with flop_counter() as counter, OwnParts(counter) as own:
        net(x).sum().backward()
    return counter.get_total_flops() - own.elsewhere


def test_a_layer_that_two_ranks_share_counts_by_half(mesh: DeviceMesh) -> None:
    """torch's counter sees the whole."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.ones(5, 3)
    whole = counted(net, x)
    assert whole == 5 * 2 * (2 * 12 + 3 * 8)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh, plan, src_data_rank=None)
    assert counted(net, x) == whole / 2


def test_what_another_stage_computes_counts_nothing() -> None:
    """Only its shape is computed here."""
    with flop_counter() as counter, OwnParts(counter) as own:
        placeholder(torch.ones(2, 3), torch.device("cpu")) @ torch.ones(3, 4)
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert counter.get_total_flops() - own.elsewhere == 2 * 2 * 3 * 4
