"""torch's FSDP2 behind the wall: each rank holds a part of the weights, their gradients and the
optimizer's state.

    shard       rank 0's weights to all -> each unit's parameters split over the ranks (DTensors), the rest in a last group
                with `pipeline`: each rank holds the layers of its stage (an extension's)
                with `tensor`: layers are split by width first (tensor.py), and these parts over the
                data ranks
                with `context`: over these and the ranks that share the tokens (an extension's)
    forward     a unit's weights are gathered before it runs, and dropped after it
    backward    they are gathered again; gradients are reduce-scattered: each rank has the *sum* of its part

Zhao et al. 2023 (PyTorch FSDP) and Rajbhandari et al. 2020 (ZeRO): `reshard_after_forward` is stage
3; without it, stage 2, weights stay gathered until the last microbatch's backward. FSDP2 divides
gradients by the number of ranks by default; here they are summed, as on the other engines, so that
the weights of microbatches hold: a factor of 1, and plain sums (any other factor is a premultiplied
sum, which only NCCL has).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from trainkit.arguments import PositiveInt, checked
from trainkit.device.precision import Precision
from trainkit.device.shards import local_of
from trainkit.engine.base import Calls, Engine, Forwarded, HandedOn, Microbatch
from trainkit.engine.blocks import blocks_of
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ddp.start import assign_ranks
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.options import refusals
from trainkit.engine.pieces import Piece
from trainkit.engine.pinning import DeviceName
from trainkit.engine.ranks import ranks_of
from trainkit.engine.sending import tensors_of
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.layouts import (
    check_groups,
    layout_of,
    refuse_gathering,
    refuse_schedule,
    refuse_settings,
)
from trainkit.extensions.fsdp.replicas import ReplicaCollectives, take_rank
from trainkit.extensions.fsdp.tensor import split_widths
from trainkit.extensions.fsdp.units import (
    explaining_dtypes,
    give_memory,
    is_split,
    part_of,
    report_waits,
    reporting_peers,
    reshard,
    resharding,
    split_units,
    units_of,
)
from trainkit.launch.environment import read_launcher
from trainkit.optim.clipping import clip

_ENTRIES = ("training_step", "validation_step", "test_step", "predict_step")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@checked
class FSDPEngine(Engine):
    """Ranks that torchrun started, each with a part of the weights, gradients and optimizer state.

    Args:
        device: "auto" takes the GPU of this rank's local rank if there are GPUs.
        shard: names of modules, or of their classes, that are gathered one at a time. Default:
            repeated blocks.
        replicas: groups of ranks that hold all weights each, and sum their gradients (HSDP); it
            divides the number of ranks.
        tensor: ranks that read the same samples, and compute a part of the width of layers each
            (tensor parallelism). They are neighbours by rank, so that one host can hold them.
            replicas x tensor x pipeline x context divides the number of ranks.
        tensor_plan: the layers to split: names or patterns of names ("model.blocks.*.up") ->
            "colwise" or "rowwise", see tensor.py. Default: that of the Task's `parallelize`.
        pipeline: stages that hold a part of the layers each and hand activations on (pipeline
            parallelism); the microbatches of a step (trainer.accumulate_grad_batches) are under way
            at once. Stages are neighbours by rank; the last one is that of rank 0.
        pipeline_schedule: "1f1b" holds the activations of at most as many microbatches as there are
            stages; "gpipe" runs all forwards of a step before its backwards; "interleaved_1f1b" is
            1f1b with several stages on each rank, for which ranks wait less, and send more.
        pipeline_chunks: stages on each rank; engine.pipeline counts ranks then. Default: 2 with
            pipeline_schedule="interleaved_1f1b", else 1.
        context: ranks that read the same samples, and have a part of the tokens of each (context
            parallelism), for long sequences; keys and values travel. The Task takes its part:
            trainkit.extensions.context.sequence. They are neighbours by rank, as tensor ranks are.
        reshard_after_forward: drop a unit's weights after its forward and gather them again for its
            backward (ZeRO 3). False keeps them from the step's first forward to its last backward
            (ZeRO 2): more memory, and a step gathers once, not twice for each microbatch. Default:
            true, and false with stages, since each step of a pipeline has many microbatches.
        cpu_offload: keep weights, gradients and optimizer state in host memory between uses; the
            optimizer runs there.
        param_dtype: gather weights and compute in this dtype, and sum gradients in float32: half
            the memory and traffic of gathered weights, in place of trainer.precision's autocast.
            The inputs of modules are cast, not the batch: targets stay as they are. Default: the
            weights' own.
    """

    name = "fsdp"
    config_key = "engine"
    splits_weights = saves_together = True
    needs_even_rounds = True
    explained_arguments = refusals("fsdp")
    comm: DDPCollectives

    def __init__(
        self,
        device: DeviceName = "auto",
        shard: list[str] | None = None,
        replicas: PositiveInt = 1,
        tensor: PositiveInt = 1,
        tensor_plan: dict[str, Literal["colwise", "rowwise"]] | None = None,
        pipeline: PositiveInt = 1,
        pipeline_schedule: str = "1f1b",
        pipeline_chunks: PositiveInt | None = None,
        context: PositiveInt = 1,
        reshard_after_forward: bool | None = None,
        cpu_offload: bool = False,
        param_dtype: Literal["bf16", "fp16"] | None = None,
    ) -> None:
        ranks = ranks_of(read_launcher())
        heartbeat = Heartbeat(ranks.watcher)
        kind = ReplicaCollectives if ranks.is_elastic else DDPCollectives
        super().__init__(device, ranks, heartbeat, kind(ranks, heartbeat))
        if ranks.watcher is not None:
            ranks.watcher.on_broken = self.comm.abort
        ranks.tensor_size, ranks.pipeline_size, ranks.context_size = tensor, pipeline, context
        self._units = shard
        self._replicas = replicas
        self._plan = tensor_plan
        if tensor_plan is not None and tensor == 1:
            raise ConfigError(
                "engine.tensor_plan is set, and engine.tensor is 1: nothing would be split. Set"
                " engine.tensor=2, say."
            )
        self._schedule = pipeline_schedule, pipeline_chunks
        refuse_schedule(pipeline, *self._schedule)
        if context > 1 and pipeline > 1:
            raise ConfigError(
                f"engine.context is {context}, and engine.pipeline is {pipeline}: stages of parts of a"
                " sequence are not there. Set one of them to 1; engine.tensor goes with either."
            )
        self._stages: Any = None  # a layout of an extension, as the next one
        self._sequence: Any = None
        self._sample: Callable[[], Any] | None = None
        self._reshard = pipeline == 1 if reshard_after_forward is None else reshard_after_forward
        self._offload = cpu_offload
        self._param_dtype = param_dtype
        given: dict[str, tuple[Any, Any]] = {
            "replicas": (replicas, 1),
            "reshard_after_forward": (reshard_after_forward, None),
            "cpu_offload": (cpu_offload, False),
            "param_dtype": (param_dtype, None),
        }
        self.shown_options = {name: own for name, (own, plain) in given.items() if own != plain}
        self._gathered: list[FSDPModule] = []

    def _start(self) -> None:
        sizes = self._replicas, self.ranks.tensor_size, self.ranks.pipeline_size
        if isinstance(self.comm, ReplicaCollectives):
            take_rank(self.ranks, self.comm, sizes)
            self.launcher = read_launcher()
        else:
            assign_ranks(self.ranks, self.launcher, self.name)
            check_groups(self.ranks.world_size, *sizes, self.ranks.context_size)
        self.pin()
        self.comm.connect(self.device)

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that hold this rank's layers."""
        if isinstance(self.comm, ReplicaCollectives):
            return self.comm.mesh
        sizes = {
            "replicate": self._replicas,
            "shard": self.ranks.data_size * self.ranks.context_size // self._replicas,
            "pipeline": self.ranks.pipeline_size,
            "tensor": self.ranks.tensor_size,
        }
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        mesh = init_device_mesh(
            self.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names
        )
        if self.ranks.pipeline_size == 1:
            return mesh
        own = tuple(name for name in names if name != "pipeline")
        return mesh[own[0] if len(own) == 1 else own]

    def agree(self, settings: StepSettings) -> None:
        """See Engine."""
        super().agree(settings)
        refuse_settings(self.ranks, settings)
        self._sample = settings.sample

    def shard(self, task: nn.Module) -> None:
        """See Engine. The task's weights are rank 0's; its parameters become DTensors, which
        optimizers are made of.

        Those without memory (engine/deferred) get that of this rank's part, to be filled.
        """
        if self.ranks.context_size > 1 and self._sequence is None:
            self._sequence = layout_of("context")(self.ranks, self.comm)
        if not is_split(task):  # else an earlier stage of this process has done it
            with_values = (tensor for tensor in tensors_of(task) if not tensor.is_meta)
            if isinstance(self.comm, ReplicaCollectives):
                self.comm.send_within(with_values)  # `prepare` sends them on to other replicas
            else:
                self.comm.broadcast_tensors(with_values)
            if self.ranks.pipeline_size > 1:
                self._stages = layout_of("pipeline")(
                    self.ranks, self.comm, self.device, *self._schedule
                )
                self._stages.cut(task, self._sample)
            elsewhere = set() if self._stages is None else self._stages.elsewhere
            device = torch.device("cpu") if self._offload else self.device
            self._split(task, elsewhere, device)

            def with_memory(tensor: Tensor) -> Tensor:
                fills = tensor.is_meta and tensor not in elsewhere
                return torch.empty_like(tensor, device=device) if fills else tensor

            task._apply(with_memory)  # type: ignore[no-untyped-call]
        self._gathered = list(units_of(task))
        if isinstance(self.comm, ReplicaCollectives):
            reshard(self._gathered)  # an attempt that has ended gathered other weights
            for module in self._gathered:
                module.set_all_reduce_hook(self.comm.sum_between)
                report_waits(module, self.comm)

    def _split(
        self,
        task: nn.Module,
        elsewhere: set[nn.Parameter],
        device: torch.device,
    ) -> None:
        mesh = self._mesh()
        blocks = blocks_of(task, self._units, "engine.shard")
        # FSDP2 would copy all weights and gradients of a stage that this rank alone holds
        copies = self._offload or self._param_dtype is not None
        sums = isinstance(self.comm, ReplicaCollectives) or mesh.size() > 1
        if self.ranks.tensor_size > 1:
            # a norm is then one sum over all ranks, not one for each dimension
            mesh._flatten("all")
            split_widths(task, mesh["tensor"], self._plan, elsewhere)
            names = tuple(mesh.mesh_dim_names or ())
            mesh = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
        dtype = None if self._param_dtype is None else _DTYPES[self._param_dtype]
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._reshard,
            "mp_policy": MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32),
            "offload_policy": (
                CPUOffloadPolicy(self.device.type == "cuda") if self._offload else OffloadPolicy()
            ),
        }
        if self._stages is not None and not copies and not sums:
            refuse_gathering(self._reshard)
            give_memory(task, elsewhere, device)
        else:
            split_units(task, blocks, elsewhere, options)
        for entry in _ENTRIES:
            step = getattr(task, entry, None)
            if not callable(step):
                continue
            if self._stages is not None:
                setattr(task, entry, self._stages.cutting(step))
            elif self._sequence is not None:
                setattr(task, entry, self._sequence.cutting(entry, step))
            register_fsdp_forward_method(task, entry)
            if self._stages is not None:
                setattr(task, entry, self._stages.staged(entry, getattr(task, entry), step))
            if not self._reshard and entry != "training_step":
                setattr(task, entry, resharding(getattr(task, entry), list(units_of(task))))
            called = explaining_dtypes(getattr(task, entry), self._param_dtype)
            setattr(task, entry, reporting_peers(called, self.ranks))

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine: buffers are sent; the weights were in `shard`."""
        super().prepare(task, optimizers, precision)
        self.send_buffers(task)
        if isinstance(self.comm, ReplicaCollectives):
            self.comm.send_between(local_of(parameter.detach()) for parameter in task.parameters())
        if precision is not None and self.ranks.model_size > 1:
            # torch's own sum is over the mesh of the first gradient alone
            precision.sum_over_ranks = self.comm.all_reduce

    def release(self) -> None:
        """See Engine."""
        if self._stages is not None:
            self._stages.release()
        super().release()

    def run_microbatches(
        self, microbatches: Iterable[Microbatch], calls: Calls[Microbatch, Forwarded]
    ) -> None:
        """See Engine: by the schedule of the pipeline, if there is one."""
        if self._stages is None:
            super().run_microbatches(microbatches, calls)
        else:
            run = reporting_peers(self._stages.run_microbatches, self.ranks)
            run(microbatches, calls, self.no_sync)

    def backward(self, loss: Tensor | HandedOn) -> None:
        """See Engine: weights are gathered, and gradients summed, while it runs."""
        run = explaining_dtypes(super().backward, self._param_dtype)
        layout = self._stages or self._sequence
        if layout is not None:
            run = functools.partial(layout.backward, run=run)
        reporting_peers(run, self.ranks)(loss)

    def reduce_gradients(self, *, gives_up: bool = False) -> None:
        """See Engine: they are summed; those of weights that stages share are summed over them."""
        super().reduce_gradients(gives_up=gives_up)
        if not self._reshard:
            reshard(self._gathered)
        if isinstance(self.comm, ReplicaCollectives):
            self.comm.check_sums()
        if self._stages is not None:
            self._stages.sum_shared()

    def step(self, clip_val: float | None = None, clip_algorithm: str = "norm") -> bool:
        """See Engine: a norm is that of the gradients of all stages."""
        if self._stages is not None:
            clip(self._optimizers, clip_val, clip_algorithm, self._stages.norm_of)
            clip_val = None
        return super().step(clip_val, clip_algorithm)

    def send_buffers(
        self, task: nn.Module, averages: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """See Engine: a stage's buffers are those of its first rank."""
        if self._stages is None:
            super().send_buffers(task, averages)
        else:
            self._stages.send_buffers(task, averages)

    def optimizer_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """See Engine."""
        if self._stages is None:
            return super().optimizer_state(optimizers)
        states: list[dict[str, Any]] = self._stages.with_others(optimizers)
        return states

    @contextlib.contextmanager
    def _keep_gradients(self) -> Iterator[None]:
        self._expect(is_last=False)
        try:
            yield
        finally:
            self._expect(is_last=True)

    def _expect(self, *, is_last: bool) -> None:
        """Set whether the next backward is the last one of the step."""
        for unit in self._gathered:
            unit.set_requires_gradient_sync(is_last, recurse=False)
            if not self._reshard:
                unit.set_reshard_after_backward(is_last, recurse=False)

    def piece_of(self, tensor: Tensor) -> Piece:
        """See Engine. Of a weight of another stage it is nothing."""
        if tensor.is_meta:
            nothing = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype)
            return Piece(nothing, (0,) * tensor.dim(), tuple(tensor.shape), False)
        if not isinstance(tensor, DTensor):
            return super().piece_of(tensor)
        replica = self.comm if isinstance(self.comm, ReplicaCollectives) else None
        return part_of(tensor, self.ranks, replica is None or replica.is_first_replica)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See Engine: whole gradients stay on each rank until the last microbatch."""
        return self._keep_gradients()
