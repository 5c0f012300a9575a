"""Horovod behind the wall: the engine. Also: horovod_reduce.py sums gradients, horovod_collectives.py does the rest
of what ranks do together, horovod_seat.py elastic jobs.

What Horovod 0.28 refuses is bridged: tensors that are not contiguous (channels_last) go as flat views, bfloat16 goes as
float32, and broadcasts go as bytes.

Horovod calls a sum done when the device has made it (its finalizer waits for an event), and `hvd.synchronize` returns then: on
GPUs the host waits there once a step, as in each loop by hand with Horovod; the next batch is sent to the device after that.

`optimizer_wrapper="horovod"` sums through the stock `hvd.DistributedOptimizer` instead; a test holds both to the same
bits. Even then the user's own optimizer takes the step, so that its state and its hooks are its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import horovod.torch as hvd
import horovod.torch.mpi_lib_v2  # noqa: F401 - says why, where the native library does not load; the line above only warns
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

from trainkit.arguments import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.engine.base import Device, PeerError
from trainkit.engine.horovod import timeline as horovod_timeline
from trainkit.engine.horovod.collectives import HorovodCollectives
from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES, HookReducer, StockReducer
from trainkit.engine.horovod.tuning import Knobs
from trainkit.engine.options import HorovodSums, changed, refusals
from trainkit.engine.process_set import check_ranks, find_place
from trainkit.engine.reduce.buckets import NamedParameter, by_name, by_number, find_sparse, split_frozen
from trainkit.engine.reduce.wire import make_wire
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.errors import ConfigError, EngineError


@checked
class HorovodEngine(HorovodCollectives):
    """Ranks that horovodrun (or mpirun, with an MPI build) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank where there are GPUs.
        optimizer_wrapper: "trainkit" sums gradients with our hooks; "horovod" with `hvd.DistributedOptimizer`, which is
            there to compare with, and has none of the options from `compression` to `sparse_as_dense`.
        compression: "fp16" sends float16 in place of wider gradients (half the bytes of float32); wire.py says what
            precision that costs. "bf16" is refused: Horovod 0.28 cannot sum it.
        op: "average": the mean over the step's samples. "sum": that times the number of ranks, which is the sum of the
            ranks' own means where their shares are equal. "adasum": Horovod's Adasum (Maleki et al. 2020) of the ranks'
            own means (each weighted by its share where shares differ); needs an MPI build and 2, 4, 8, ... ranks.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after it, both in their own
            dtype: below 1 it lifts small gradients above float16's underflow, above 1 it keeps large ones from overflowing.
        num_groups: sum parameters in so many groups, each by one grouped allreduce that starts when all of its gradients
            are ready. Default: one allreduce a parameter, which Horovod fuses as they come.
        groups: lists of names of parameters or modules; each list is one group, what is not named stays alone.
        sparse_as_dense: sum the gradients of sparse embeddings as dense ones. Default: they travel as rows, and the
            optimizer gets a sparse gradient as in a single process (SparseAdam needs it). See buckets.find_sparse.
        process_set: the ranks that train, as the launcher counts them; the others wait. Default: all.
        fusion_threshold_mb: Horovod sums tensors that are ready together as one, up to so many MiB (its default: 128).
        cycle_time_ms: how often Horovod's background thread looks for tensors that are ready. Default: 0.1 ms on a GPU,
            as record runs do; Horovod's own 1 ms on the CPU, where the thread takes its time from the computing.
        cache_capacity: how many tensors Horovod remembers the negotiation of (its default: 1024).
        autotune: let Horovod search for the best of these three while training. Those that are given stay as they are.
        autotune_log_file: where rank 0 notes what it tried, as CSV.

    The last five are read by Horovod when it starts, from variables of the environment (HOROVOD_FUSION_THRESHOLD, ...);
    those that are set already win, and that is said.
    """

    name = "horovod"
    config_key = "engine"
    explained_arguments = refusals("horovod")
    peer_errors = (HorovodInternalError,)

    def __init__(
        self,
        device: Device = "auto",
        optimizer_wrapper: Literal["trainkit", "horovod"] = "trainkit",
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
        super().__init__(device)
        self._sums = HorovodSums(optimizer_wrapper, compression, op, gradient_predivide_factor, num_groups, groups, process_set)
        self.told = changed(compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor)
        self._sparse_as_dense = sparse_as_dense
        self._knobs = Knobs(fusion_threshold_mb, cycle_time_ms, cache_capacity, autotune, autotune_log_file)
        self._reducer: HookReducer | StockReducer | None = None

    def _start(self) -> None:
        knobs, running = self._knobs, hvd.is_initialized()
        if not running:
            self._take_seat(self._sums.process_set)
        on_gpu = self._device_wish != "cpu" and torch.cuda.is_available()
        if on_gpu and not running and knobs.cycle_time_ms is None and not knobs.autotune:
            # A default, not a wish: it gives way to the user's variable without a word.
            knobs = dataclasses.replace(knobs, cycle_time_ms=None if "HOROVOD_CYCLE_TIME" in os.environ else 0.1)
        overruled = knobs.apply(os.environ, running)
        self._init()
        self._pin_device()
        self._check_adasum()
        if self._ranks is not hvd.global_process_set:
            hosts = hvd.allgather(torch.tensor([self.rank - self.local_rank]), name="trainkit.hosts").tolist()
            self._take_place(find_place(tuple(self._ranks.ranks), self.rank, hosts))
        if self.is_main:
            for sentence in overruled:
                print(sentence, flush=True)

    def outstanding(self) -> list[str]:
        """See Engine."""
        return self._reducer.outstanding() if isinstance(self._reducer, HookReducer) else []

    def start_timeline(self, path: Path) -> str:
        """See Engine."""
        super().start_timeline(path)
        return horovod_timeline.start(path)

    def stop_timeline(self) -> None:
        """See Engine."""
        super().stop_timeline()
        horovod_timeline.stop()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """See Engine."""
        return horovod_timeline.settings() | {"wire": self._sums.compression}

    def _recordable(self) -> HookReducer | None:
        return self._reducer if isinstance(self._reducer, HookReducer) else None

    def _init(self) -> None:
        """Start Horovod, where it does not run yet, and make the process set.

        Raises:
            ConfigError: the process set names ranks that there are not.
            EngineError: the launcher started several processes, and Horovod sees one.
        """
        started = self.launcher
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise EngineError(
                "horovodrun runs in Horovod's own elastic mode, which loses samples and lets ranks drift apart. Build it with "
                "`python -m trainkit horovod install`: its horovodrun takes the same arguments."
            )
        chosen = None if self._sums.process_set is None else check_ranks(self._sums.process_set, started.world_size)
        self._ranks = hvd.global_process_set
        if chosen is not None and len(chosen) < started.world_size:
            self._ranks = hvd.ProcessSet(chosen)
        self.whereabouts.waiting = "the other ranks to connect"
        try:
            hvd.init(process_sets=[] if self._ranks is hvd.global_process_set else [self._ranks])
        except KeyError as error:  # it started earlier in this process, without this set
            raise EngineError(
                f"engine.process_set is {self._sums.process_set}, but Horovod runs in this process already, without this set. "
                "Give the first engine of the process this set."
            ) from error
        except (ValueError, RuntimeError) as error:  # a rank that was to be met is gone
            raise PeerError(f"Horovod could not connect the ranks: {error}") from error
        finally:
            self.whereabouts.waiting = ""
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        if started.world_size > 1 and self.world_size == 1:
            cure = {
                "torchrun": "Use horovodrun in place of torchrun, or engine=ddp.",
                "mpirun": "This Horovod was built without MPI: use horovodrun, or build it with "
                "`python -m trainkit horovod install --mpi`.",
            }.get(started.name, "Use horovodrun.")
            raise EngineError(
                f"{started.name} started {started.world_size} processes, but Horovod sees a world of 1: each would train "
                f"alone. {cure}"
            )

    def _check_adasum(self) -> None:
        if self._sums.op != "adasum" or self.world_size == 1:
            return
        if not (hvd.mpi_built() and hvd.mpi_enabled()):
            cure = (
                "Start with `mpirun -np N ...`, not with horovodrun --gloo."
                if hvd.mpi_built()
                else "Build it with MPI: `python -m trainkit horovod install --mpi`, and start with mpirun."
            )
            raise EngineError(f"engine.op is 'adasum', which Horovod computes by MPI only, and it runs on Gloo here. {cure}")
        if self.world_size & (self.world_size - 1):
            raise ConfigError(
                f"engine.op is 'adasum', which needs 2, 4, 8, ... ranks, and there are {self.world_size}. Start another "
                "number, or use engine.op=average."
            )

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Engine."""
        self.release()
        trained, frozen = split_frozen(model.named_parameters())
        sparse = set() if self._sparse_as_dense else find_sparse(model, optimizers)
        self.broadcast_tensors(tensors_of(model))
        send_optimizer_state(self, optimizers)
        if self.world_size == 1:
            return
        if self._sums.wrapper == "horovod":
            self._reducer = StockReducer(trained, frozen, optimizers, sparse)
            return
        if self._sums.op == "adasum" and sparse:
            raise ConfigError(
                "engine.op is 'adasum', and the model has a sparse embedding, whose rows have no Adasum. Set "
                "engine.sparse_as_dense=true."
            )
        wire = make_wire(self._sums.compression, self._sums.op, self._sums.predivide, self.world_size, ALLREDUCE_TYPES)
        self._reducer = HookReducer(self._buckets(trained, sparse), frozen, wire, sparse, self._sums.op, self._ranks)

    def _buckets(self, trained: list[NamedParameter], sparse: set[Tensor]) -> list[list[NamedParameter]]:
        if self._sums.num_groups is not None:
            return by_number(trained, self._sums.num_groups, sparse)
        # Backward reaches the last layers first: Horovod's negotiation meets them in that order.
        return by_name(trained, self._sums.groups or [], sparse)

    def release(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See Engine."""
        return self._reducer.no_sync() if self._reducer is not None else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """See Engine."""
        with self._peers(""):
            super().backward(loss)

    def reduce_gradients(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            with self._peers("the sums of gradients"):
                self._reducer.finish()
