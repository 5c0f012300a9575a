"""torch.distributed behind the wall: the engine. Its parts: reduce.py sums gradients,
collectives.py does what else ranks do together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from trainkit.arguments import PositiveFloat, checked
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ddp.reduce import BucketReducer
from trainkit.engine.ddp.start import assign_ranks
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.options import changed, refusals
from trainkit.engine.pinning import DeviceName
from trainkit.engine.ranks import check_ranks, ranks_of
from trainkit.engine.reduce.buckets import by_size, find_sparse, split_frozen
from trainkit.engine.reduce.wire import make_wire
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.errors import ConfigError
from trainkit.launch.environment import read_launcher


@checked
class DDPEngine(Engine):
    """Ranks that torchrun (or anything that sets its variables) started, or an elastic driver.

    Args:
        device: "auto" takes the GPU of this rank's local rank if there are GPUs.
        compression: "fp16" or "bf16" sends that dtype in place of wider gradients (half the bytes
            of float32), which is what torch's fp16_compress_hook and bf16_compress_hook do; wire.py
            says what precision it costs.
        op: "average": the mean over the step's samples. "sum": that times the number of ranks,
            which is the sum of the ranks' own means if their shares are equal. "adasum" is refused:
            it is Horovod's.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after
            it, both in their own dtype: below 1 it lifts small gradients above float16's underflow,
            above 1 it keeps large ones from overflowing.
        bucket_cap_mb: size of a bucket of gradients, in MiB. Smaller buckets start earlier, larger
            ones cost fewer calls.
        sparse_as_dense: sum the gradients of sparse embeddings as dense ones. Default: they travel
            as rows, and the optimizer gets a sparse gradient as in a single process. See
            buckets.find_sparse.
        process_set: the ranks that train, as the launcher counts them; the other ranks wait.
            Default: all.
    """

    name = "ddp"
    config_key = "engine"
    explained_arguments = refusals("ddp")
    comm: DDPCollectives

    def __init__(
        self,
        device: DeviceName = "auto",
        compression: Literal["none", "fp16", "bf16"] = "none",
        op: Literal["average", "sum", "adasum"] = "average",
        gradient_predivide_factor: PositiveFloat = 1.0,
        bucket_cap_mb: PositiveFloat = 25.0,
        sparse_as_dense: bool = False,
        process_set: list[int] | None = None,
    ) -> None:
        ranks = ranks_of(read_launcher())
        heartbeat = Heartbeat(ranks.watcher, sum_settings={"wire": compression})
        super().__init__(device, ranks, heartbeat, DDPCollectives(ranks, heartbeat))
        if ranks.watcher is not None:
            ranks.watcher.on_broken = self.comm.abort
        if op == "adasum":
            raise ConfigError(
                "engine.op is 'adasum', which is Horovod's: torch.distributed has none. Start with"
                " horovodrun or mpirun, or use engine.op=average."
            )
        self._compression = compression
        self._op = op
        self._predivide = gradient_predivide_factor
        self.shown_options = changed(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            bucket_cap_mb=bucket_cap_mb,
            sparse_as_dense=sparse_as_dense,
        )
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def _start(self) -> None:
        if self.ranks.is_elastic:
            self._take_rank()
        else:
            assign_ranks(self.ranks, self.launcher, self.name)
        world_size = self.ranks.world_size
        chosen = None if self._process_set is None else check_ranks(self._process_set, world_size)
        self.pin()
        self.comm.connect(self.device)
        if chosen is not None and len(chosen) < world_size:
            self.comm.narrow(chosen)

    def _take_rank(self) -> None:
        """Take the ranks of from now on of an elastic job, unless they are connected already."""
        if not self.comm.is_connected:
            self.ranks.join(self._process_set)
        self.launcher = launcher = read_launcher()
        self.ranks.assign(
            launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_size
        )

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        self.comm.broadcast_tensors(tensors_of(task))
        send_optimizer_state(self.comm, optimizers, self.device)
        sparse = set() if self._sparse_as_dense else find_sparse(task, optimizers)
        self.approximation.start(task, optimizers, sparse)
        if self.approximation.sums_gradients:
            trained, frozen = split_frozen(task.named_parameters())
            wire = make_wire(self._compression, self._op, self._predivide, self.ranks.world_size)
            buckets = by_size(trained, self._bucket_bytes, sparse)
            self._reducer = self.heartbeat.reducer = BucketReducer(
                buckets, frozen, wire, sparse, self.comm.group, self.approximation.low_rank
            )
