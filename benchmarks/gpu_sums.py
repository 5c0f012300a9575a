"""How sums of gradients overlap with backward, on one GPU: gpu.py's part about communication.

At one rank trainkit sums nothing. Here its engines are made to, so operations and their times are
those of many ranks; nothing is on the wire, and NCCL may launch no kernel for a sum over one rank:
other streams then show only copies.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_profile import Profile, Profiled, Window
from benchmarks.gpu_training import ByHand, Fit, Model, Turns
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.engine.ddp.reduce import BucketReducer
from trainkit.engine.reduce.buckets import by_name, by_size, split_frozen
from trainkit.engine.reduce.wire import make_wire
from trainkit.extensions.communication.low_rank import PowerSGDSums
from trainkit.extensions.communication.settings import PowerSGD

_BUCKET = 25 * 2**20  # DDPEngine's default
_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "one",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    # asked for by engine=ddp, and not used: the process group is there already
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


class SummingDDP(DDPEngine):
    """Sums at one rank too."""

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        trained, frozen = split_frozen(task.named_parameters())
        wire = make_wire("none", "average", 1.0, 1)
        self._reducer = self.heartbeat.reducer = BucketReducer(
            by_size(trained, _BUCKET, set()), frozen, wire, set(), None
        )


def summing_horovod(rank: int | None = None) -> Engine:
    """Return an engine=horovod that sums at one rank too.

    Args:
        rank: of the factors that are summed in place of gradients (communication=powersgd);
            None: gradients.

    Raises:
        ImportError: Horovod is not there.
    """
    import horovod.torch as hvd

    from trainkit.engine.horovod.engine import HorovodEngine
    from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES, HookReducer

    class SummingHorovod(HorovodEngine):
        def prepare(
            self,
            task: nn.Module,
            optimizers: Sequence[torch.optim.Optimizer],
            precision: Precision | None = None,
        ) -> None:
            super().prepare(task, optimizers, precision)
            trained, frozen = split_frozen(task.named_parameters())
            wire = make_wire("none", "average", 1.0, 1, ALLREDUCE_TYPES)
            ranks, buckets = hvd.global_process_set, by_name(trained, [], set())
            factors = None
            if rank is not None:
                factors = PowerSGDSums(PowerSGD(rank=rank, start_after_steps=0))
                factors.start(trained, set())
                buckets = by_size(trained, _BUCKET, set())
            self._reducer = self.heartbeat.reducer = HookReducer(
                buckets, frozen, wire, set(), "average", ranks, factors
            )

    return SummingHorovod()


class ByHandDDP(ByHand):
    """The loop by hand with DistributedDataParallel."""

    def __init__(self, model: Model, device: torch.device, mode: str | None) -> None:
        super().__init__(model, device, mode)
        ids = [0] if device.type == "cuda" else None
        self.forward = DistributedDataParallel(
            self.model, device_ids=ids, gradient_as_bucket_view=True
        )


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Let torch.distributed run, with one rank, as if torchrun had started it."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, _TORCHRUN):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def with_ddp(model: Model, device: torch.device) -> tuple[Turns, Profile, Profile]:
    """Return the times of trainkit and of the loop by hand with DDP,
    and the profiles of both in this order.
    """
    with one_rank(device):
        hand, batch = ByHandDDP(model, device, None), model.images(device)
        turns, profile = run(model, device, SummingDDP(), hand)
        window = Window(device)
        hand.seconds(batch, 5)
        return turns, profile, window.end(5)


def run(
    model: Model,
    device: torch.device,
    engine: Engine,
    hand: ByHand,
    precision: str = "bf16-mixed",
) -> tuple[Turns, Profile]:
    """Return the times of trainkit with an engine and of a loop by hand, and trainkit's profile,
    of five steps at its end.
    """
    batch = model.images(device)
    turns, steps = Turns(hand, batch, model.block), model.block * (model.blocks + 1)
    profiled = Profiled(steps + 1, steps + 6)
    Fit(model, device, engine=engine, precision=precision)([batch] * (steps + 6), [turns, profiled])
    assert profiled.profile is not None, "the training has that many steps"
    return turns, profiled.profile
