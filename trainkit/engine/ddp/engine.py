"""torch.distributed behind the wall: the engine. Its parts: reduce.py sums gradients, collectives.py does what else ranks do
together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from trainkit.arguments import PositiveFloat, checked
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ddp.reduce import BucketReducer
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.options import changed, refusals
from trainkit.engine.pinning import Device
from trainkit.engine.ranks import Ranks, check_ranks
from trainkit.engine.reduce.buckets import by_size, find_sparse, split_frozen
from trainkit.engine.reduce.wire import make_wire
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import read_launcher


@checked
class DDPEngine(Engine):
    """Ranks that torchrun (or anything that sets its variables) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank if there are GPUs.
        compression: "fp16" or "bf16" sends that dtype in place of wider gradients (half the bytes of float32), which is
            what torch's fp16_compress_hook and bf16_compress_hook do; wire.py says what precision it costs.
        op: "average": the mean over the step's samples. "sum": that times the number of ranks, which is the sum of the
            ranks' own means if their shares are equal. "adasum" is refused: it is Horovod's.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after it, both in their own
            dtype: below 1 it lifts small gradients above float16's underflow, above 1 it keeps large ones from overflowing.
        bucket_cap_mb: size of a bucket of gradients, in MiB. Smaller buckets start earlier, larger ones cost fewer calls.
        sparse_as_dense: sum the gradients of sparse embeddings as dense ones. Default: they travel as rows, and the
            optimizer gets a sparse gradient as in a single process (SparseAdam needs it). See buckets.find_sparse.
        process_set: the ranks that train, as the launcher counts them; the other ranks wait. Default: all.
    """

    name = "ddp"
    config_key = "engine"
    explained_arguments = refusals("ddp")
    comm: DDPCollectives

    def __init__(
        self,
        device: Device = "auto",
        compression: Literal["none", "fp16", "bf16"] = "none",
        op: Literal["average", "sum", "adasum"] = "average",
        gradient_predivide_factor: PositiveFloat = 1.0,
        bucket_cap_mb: PositiveFloat = 25.0,
        sparse_as_dense: bool = False,
        process_set: list[int] | None = None,
    ) -> None:
        ranks, heartbeat = Ranks(read_launcher()), Heartbeat(sum_settings={"wire": compression})
        super().__init__(device, ranks, heartbeat, DDPCollectives(ranks, heartbeat))
        if op == "adasum":
            raise ConfigError(
                "engine.op is 'adasum', which is Horovod's: torch.distributed has none. Start with horovodrun or mpirun, or "
                "use engine.op=average."
            )
        self._compression, self._op, self._predivide = compression, op, gradient_predivide_factor
        self.shown_options = changed(compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor)
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def _start(self) -> None:
        if self.launcher.name not in ("torchrun", "env"):
            if self.launcher.world_size > 1:
                raise EngineError(
                    f"engine=ddp, but {self.launcher.name} started {self.launcher.world_size} processes without torchrun's "
                    "variables. Use torchrun, or engine=auto."
                )
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise EngineError(
                    f"engine=ddp needs a launcher (not set: {', '.join(missing)}). Start with `torchrun --nproc-per-node 2 "
                    "-m trainkit fit ...`, or use engine=auto."
                )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_size = os.environ.get("LOCAL_WORLD_SIZE", str(world_size if "LOCAL_RANK" in os.environ else 1))
        self.ranks.assign(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), int(local_size))
        chosen = None if self._process_set is None else check_ranks(self._process_set, world_size)
        self.pin()
        self.comm.connect(self.device)
        if chosen is not None and len(chosen) < world_size:
            self.comm.narrow(chosen)

    def prepare(self, task: nn.Module, optimizers: Sequence[torch.optim.Optimizer], precision: Precision | None = None) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        self.comm.broadcast_tensors(tensors_of(task))
        send_optimizer_state(self.comm, optimizers)
        world_size = self.ranks.world_size
        if world_size > 1:
            trained, frozen = split_frozen(task.named_parameters())
            sparse = set() if self._sparse_as_dense else find_sparse(task, optimizers)
            wire = make_wire(self._compression, self._op, self._predivide, world_size)
            buckets = by_size(trained, self._bucket_bytes, sparse)
            self._sum_by(BucketReducer(buckets, frozen, wire, sparse, self.comm.group))
