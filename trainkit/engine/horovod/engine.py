"""Horovod behind the wall: the engine. Its parts: reduce.py sums gradients, collectives.py does
what else ranks do together, rendezvous.py has srun's tasks meet, heartbeat.py holds what others see,
tuning.py Horovod's own settings. An extension may bring ranks that change (ranks.py).

Horovod reports a sum as done when the device has computed it (its finalizer waits for an event),
and the wait for it (waiting.py) ends then: on GPUs the host waits there once a step, as in each loop by
hand with Horovod. The next step's first batch is sent to the device before (data/early.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

import horovod.torch as hvd
import horovod.torch.mpi_lib_v2  # noqa: F401 - says why, if the native library does not load; the line above only warns
import torch
from torch import Tensor, nn

from trainkit.arguments import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.console import warning
from trainkit.device.accelerator import has_streams
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine, HandedOn
from trainkit.engine.horovod.collectives import HorovodCollectives
from trainkit.engine.horovod.heartbeat import HorovodHeartbeat
from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES, HookReducer
from trainkit.engine.horovod.rendezvous import meet
from trainkit.engine.horovod.tuning import Tuning
from trainkit.engine.options import HorovodSums, changed, refusals
from trainkit.engine.pinning import DeviceName, gpu_of, require_own
from trainkit.engine.ranks import ranks_of
from trainkit.engine.reduce.buckets import (
    NamedParameter,
    by_name,
    by_number,
    by_size,
    find_sparse,
    split_frozen,
)
from trainkit.engine.reduce.wire import make_wire
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import read_launcher
from trainkit.launch.slurm.step import this_step

_FACTORED_BYTES = 25 * 2**20  # of a bucket of gradients that travel as factors, as on ddp


@checked
class HorovodEngine(Engine):
    """Ranks that horovodrun or srun (or mpirun, with an MPI build) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank if there are GPUs; that needs a
            Horovod that was built with NCCL.
        compression: "fp16" sends float16 in place of wider gradients (half the bytes of float32);
            wire.py says what precision that costs. "bf16" is refused: Horovod 0.28 cannot sum it.
        op: "average": the mean over the step's samples. "sum": that times the number of ranks,
            which is the sum of the ranks' own means if their shares are equal. "adasum": Horovod's
            Adasum (Maleki et al. 2020) of the ranks' own means (each weighted by its share if
            shares differ); needs an MPI build and 2, 4, 8, ... ranks.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after
            it, both in their own dtype: below 1 it lifts small gradients above float16's underflow,
            above 1 it keeps large ones from overflowing.
        num_groups: sum parameters in this many groups, each by one grouped allreduce that starts
            when all of its gradients are ready. Default: one allreduce a parameter, which Horovod
            fuses as they become ready.
        groups: lists of names of parameters or modules; each list is one group; any other parameter
            is summed alone.
        sparse_as_dense: sum the gradients of sparse embeddings as dense ones. Default: they travel
            as rows, and the optimizer gets a sparse gradient as in a single process. See
            buckets.find_sparse.
        process_set: the ranks that train, as the launcher counts them; the other ranks wait.
            Default: all.
        fusion_threshold_mb: Horovod sums tensors that are ready together as one, up to this many
            MiB (its default: 128). On three ranks or more the order of its additions, and so the
            last digit, depends on what was fused; 0 fixes it.
        cycle_time_ms: how often Horovod's background thread looks for tensors that are ready.
            Default: 0.1 ms on a GPU, as record runs do; Horovod's own 1 ms on the CPU, on which the
            thread competes with the computing.
        cache_capacity: how many tensors Horovod remembers the negotiation of (its default: 1024).
        autotune: let Horovod search for the best of these three while training. Those that are
            given stay fixed.
        autotune_log_file: the CSV file into which rank 0 writes what it tried.

    The last five are read by Horovod when it starts, from variables of the environment
    (HOROVOD_FUSION_THRESHOLD, ...); those that are set already win, and rank 0 prints that.
    """

    name = "horovod"
    config_key = "engine"
    explained_arguments = refusals("horovod")
    comm: HorovodCollectives

    def __init__(
        self,
        device: DeviceName = "auto",
        compression: Literal["none", "fp16", "bf16"] = "none",
        op: Literal["average", "sum", "adasum"] = "average",
        gradient_predivide_factor: PositiveFloat = 1.0,
        num_groups: PositiveInt | None = None,
        groups: list[list[str]] | None = None,
        sparse_as_dense: bool = False,
        process_set: list[int] | None = None,
        fusion_threshold_mb: NonNegativeFloat | None = None,
        cycle_time_ms: PositiveFloat | None = None,
        cache_capacity: NonNegativeInt | None = None,
        autotune: bool = False,
        autotune_log_file: str | None = None,
    ) -> None:
        ranks = ranks_of(read_launcher())
        heartbeat = HorovodHeartbeat(ranks.watcher, compression)
        super().__init__(device, ranks, heartbeat, HorovodCollectives(ranks, heartbeat))
        self._sums = HorovodSums(
            compression, op, gradient_predivide_factor, num_groups, groups, process_set
        )
        self.shown_options = changed(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
        )
        self._sparse_as_dense = sparse_as_dense
        self._tuning = Tuning(
            fusion_threshold_mb, cycle_time_ms, cache_capacity, autotune, autotune_log_file
        )

    def _start(self) -> None:
        tuning, running = self._tuning, hvd.is_initialized()
        if not running:
            self.ranks.join(self._sums.process_set)
            self.launcher = read_launcher()
        on_gpu = self._requested_device != "cpu" and torch.cuda.is_available()
        if on_gpu and not running and tuning.cycle_time_ms is None and not tuning.autotune:
            # A default, not a setting of the user: it gives way to the user's variable without a
            # message.
            tuning = dataclasses.replace(
                tuning, cycle_time_ms=None if "HOROVOD_CYCLE_TIME" in os.environ else 0.1
            )
        overruled = tuning.apply(os.environ, running)
        self._connect()
        self.pin()
        self._check_gpu()
        self._check_adasum()
        self.comm.narrow()
        completes_early = os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION") == "1"
        self.comm.waits_for_device = has_streams(self.device) and not completes_early
        # A build with NCCL is one on all ranks; others know no GPU, and need no round trip.
        if hvd.nccl_built() and self.ranks.takes_part and self.ranks.world_size > 1:
            own, rank = gpu_of(self.device), self.ranks.rank
            gpus = self.comm.all_gather_object(own)
            require_own(self.ranks, own, gpus[:rank] + gpus[rank + 1 :])
        if self.ranks.is_main:
            for sentence in overruled:
                warning(sentence)

    def _connect(self) -> None:
        """Start Horovod, unless it runs.

        Raises:
            ConfigError: the process set names ranks that were not started.
            EngineError: the launcher started several processes, and Horovod sees one.
        """
        started = self.launcher
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            cure = (
                "Leave out hvd.init() before the Trainer: it has horovodrun pass the job to"
                " Horovod's driver, as does TRAINKIT_ELASTIC_DRIVER=horovod."
                if os.environ.get("TRAINKIT_ELASTIC_DRIVER") == "horovod"
                else (
                    "Build it with `python -m trainkit horovod install`: its horovodrun takes the"
                    " same arguments."
                )
            )
            raise EngineError(
                "horovodrun runs in Horovod's own elastic mode, which loses samples and lets ranks"
                f" drift apart. {cure}"
            )
        if read_launcher().name == "srun" and not hvd.is_initialized():
            os.environ |= meet(this_step())
        self.comm.connect(started, self._sums.process_set)
        if started.world_size > 1 and self.ranks.world_size == 1:
            cure = self._cure(started.name)
            raise EngineError(
                f"{started.name} started {started.world_size} processes, but Horovod sees a world"
                f" of 1: each would train alone. {cure}"
            )

    @staticmethod
    def _cure(launcher: str) -> str:
        if launcher == "torchrun":
            return "Use horovodrun in place of torchrun, or engine=ddp."
        if launcher != "mpirun":
            return "Use horovodrun."
        if not hvd.mpi_built():
            return (
                "This Horovod was built without MPI: use horovodrun, or build it with "
                "`python -m trainkit horovod install --mpi`."
            )
        if not hvd.mpi_enabled():
            return (
                "HOROVOD_CONTROLLER or HOROVOD_CPU_OPERATIONS has Horovod run on Gloo, which mpirun"
                " does not start: unset them."
            )
        return (
            "This Horovod was built with another MPI than this mpirun's: put the mpirun that it was"
            " built with first on the PATH, or build it again with `python -m trainkit horovod"
            " install --mpi --rebuild`."
        )

    def _check_gpu(self) -> None:
        """Refuse a GPU under a Horovod that was built for CPUs.

        Its sums of GPU tensors end in its background thread by an error, and the ranks then blame
        each other.
        """
        if self.device.type == "cuda" and not (
            hvd.nccl_built() or hvd.cuda_built() or hvd.rocm_built()
        ):
            raise EngineError(
                f"engine.device is '{self._requested_device}', which is a GPU here, and this"
                " Horovod was built without CUDA and NCCL: it can sum on the CPU alone. Build it"
                " again (`python -m trainkit horovod install --gpu`, which says what is missing),"
                " start with torchrun (engine=ddp), or train on the CPU (engine.device=cpu)."
            )

    def _check_adasum(self) -> None:
        world_size = self.ranks.world_size
        if self._sums.op != "adasum" or world_size == 1:
            return
        if not (hvd.mpi_built() and hvd.mpi_enabled()):
            cure = (
                "Start with `mpirun -np N ...`, not with horovodrun --gloo."
                if hvd.mpi_built()
                else (
                    "Build it with MPI: `python -m trainkit horovod install --mpi`, and start with"
                    " mpirun."
                )
            )
            raise EngineError(
                "engine.op is 'adasum', which Horovod computes by MPI only, and it runs on Gloo"
                f" here. {cure}"
            )
        if world_size & (world_size - 1):
            raise ConfigError(
                "engine.op is 'adasum', which needs 2, 4, 8, ... ranks, and there are"
                f" {world_size}. Start another number, or use engine.op=average."
            )

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        trained, frozen = split_frozen(task.named_parameters())
        sparse = set() if self._sparse_as_dense else find_sparse(task, optimizers)
        self.comm.broadcast_tensors(tensors_of(task))
        send_optimizer_state(self.comm, optimizers, self.device)
        self.approximation.start(task, optimizers, sparse)
        if not self.approximation.sums_gradients:
            return
        if self.device.type != "cpu":
            self.comm.reserve_fusion_buffer(self.device)
        sums = self._sums
        if sums.op == "adasum" and sparse:
            raise ConfigError(
                "engine.op is 'adasum', and the model has a sparse embedding, whose rows have no"
                " Adasum. Set engine.sparse_as_dense=true."
            )
        wire = make_wire(
            sums.compression, sums.op, sums.predivide, self.ranks.world_size, ALLREDUCE_TYPES
        )
        buckets = self._buckets(trained, sparse)
        low_rank = self.approximation.low_rank
        self._reducer = self.heartbeat.reducer = HookReducer(
            buckets, frozen, wire, sparse, sums.op, self.comm.process_set, low_rank
        )

    def _buckets(
        self, trained: list[NamedParameter], sparse: set[Tensor]
    ) -> list[list[NamedParameter]]:
        if self._sums.num_groups is not None:
            return by_number(trained, self._sums.num_groups, sparse)
        if self.approximation.low_rank is not None and not self._sums.groups:
            # one by one, each would wait for a message before its second
            return by_size(trained, _FACTORED_BYTES, sparse)
        # Backward reaches the last layers first: Horovod's negotiation meets them in that order.
        return by_name(trained, self._sums.groups or [], sparse)

    def backward(self, loss: Tensor | HandedOn) -> None:
        """See Engine."""
        # sums that start in a hook fail there if another rank is gone
        with self.comm.waiting_for(""):
            super().backward(loss)
