"""Horovod behind the wall: the only file that imports it.

Gradients are summed by Horovod's asynchronous allreduce, one tensor a parameter; Horovod fuses them by itself. The
torch optimizer stays untouched. What Horovod 0.28 refuses is bridged here: tensors that are not contiguous
(channels_last) go as flat views, bfloat16 goes as float32, and broadcasts go as bytes.

`optimizer_wrapper="horovod"` sums through the stock `hvd.DistributedOptimizer` instead; a test holds both to the same
bits. Even then the user's own optimizer takes the step, so that its state and its hooks are its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import horovod.torch as hvd
import horovod.torch.mpi_lib_v2  # noqa: F401 - says why, where the native library does not load; the line above only warns
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

from trainkit.arguments import PositiveFloat, checked
from trainkit.engine.base import Device, Engine, PeerError, dense_view, send_optimizer_state, tensors_of
from trainkit.engine.reducer import Bucket, GradientReducer, NamedParameter, split_frozen
from trainkit.errors import ConfigError, EngineError

# What Horovod's allreduce takes; everything else travels as the wider type beside it (2.2 of its limits: no bfloat16).
_ALLREDUCE_TYPES = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


@checked
class HorovodEngine(Engine):
    """Ranks that horovodrun (or mpirun, with an MPI build) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank where there are GPUs.
        optimizer_wrapper: "trainkit" sums gradients with our hooks; "horovod" with `hvd.DistributedOptimizer`.
        cycle_time_ms: how often Horovod's background thread looks for tensors that are ready. Default: 0.1 ms on a GPU,
            as record runs do; Horovod's own 1 ms on the CPU, where the thread takes its time from the computing.
            HOROVOD_CYCLE_TIME in the environment wins.
    """

    name = "horovod"
    config_key = "engine"

    def __init__(
        self,
        device: Device = "auto",
        optimizer_wrapper: Literal["trainkit", "horovod"] = "trainkit",
        cycle_time_ms: PositiveFloat | None = None,
    ) -> None:
        super().__init__(device)
        self._optimizer_wrapper = optimizer_wrapper
        self._cycle_time_ms = cycle_time_ms
        self._reducer: HookReducer | StockReducer | None = None

    def _start(self) -> None:
        cycle_time_ms = self._cycle_time_ms
        if cycle_time_ms is None and self._device_wish != "cpu" and torch.cuda.is_available():
            cycle_time_ms = 0.1
        if cycle_time_ms is not None:
            os.environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle_time_ms))
        hvd.init()
        self.rank, self.world_size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        started = self.launcher
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
        self._pin_device()

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Engine."""
        self.release()
        self.broadcast_tensors(tensors_of(model))
        send_optimizer_state(self, optimizers)
        if self.world_size == 1:
            return
        trained, frozen = split_frozen(model.named_parameters())
        if self._optimizer_wrapper == "horovod":
            self._reducer = StockReducer(trained, frozen, optimizers)
        else:
            # Backward reaches the last layers first: Horovod's negotiation meets them in that order.
            self._reducer = HookReducer([[named] for named in reversed(trained)], frozen, in_order=False)

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
        with _peers():
            super().backward(loss)

    def reduce_gradients(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            with _peers():
                self._reducer.finish()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Engine."""
        wire = tensor.detach().reshape(-1)
        if wire.dtype not in _ALLREDUCE_TYPES:
            wire = wire.to(torch.float32 if wire.is_floating_point() else torch.int64)
        with _peers():
            total = hvd.allreduce(wire.contiguous(), op=hvd.Sum, name="trainkit.all_reduce")
        result: Tensor = total.to(tensor.dtype).reshape(tensor.shape)
        return result

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Engine."""
        if self.world_size == 1:
            return
        sent: list[tuple[Any, Tensor, Tensor]] = []
        with _peers():
            for i, tensor in enumerate(tensors):
                flat = dense_view(tensor)
                held = tensor.contiguous().reshape(-1) if flat is None else flat
                wire = held.view(torch.uint8)
                sent.append((hvd.broadcast_async_(wire, root_rank=0, name=f"trainkit.broadcast.{i}"), held, tensor))
            for handle, held, tensor in sent:
                hvd.synchronize(handle)
                if held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held.reshape(tensor.shape))

    def broadcast_object(self, value: Any) -> Any:
        """See Engine."""
        with _peers():
            return hvd.broadcast_object(value, root_rank=0, name="trainkit.broadcast_object")

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Engine."""
        with _peers():
            return list(hvd.allgather_object(value, name="trainkit.all_gather_object"))

    def barrier(self) -> None:
        """See Engine."""
        with _peers():
            hvd.barrier()


class HookReducer(GradientReducer):
    """Each parameter's gradient as one asynchronous allreduce, in place where Horovod can."""

    def _start(self, bucket: Bucket) -> Any:
        ((name, parameter),) = bucket.entries
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        if grad.stride() != parameter.stride():  # all ranks must send their elements in the same order
            grad = torch.empty_like(parameter).copy_(grad)
        parameter.grad = grad
        flat = dense_view(grad)
        wire = grad.contiguous().reshape(-1) if flat is None else flat
        if wire.dtype not in _ALLREDUCE_TYPES:
            wire = wire.to(torch.float32)
        return hvd.allreduce_async_(wire, op=hvd.Sum, name="trainkit.grad." + name), wire

    def _end(self, bucket: Bucket) -> None:
        ((_, parameter),) = bucket.entries
        handle, wire = bucket.handle
        hvd.synchronize(handle)
        grad = parameter.grad
        assert grad is not None
        if wire.data_ptr() != grad.data_ptr():
            flat = dense_view(grad)
            grad.copy_(wire.reshape(grad.shape)) if flat is None else flat.copy_(wire)

    def _start_flags(self, flags: Tensor) -> Any:
        return hvd.allreduce_async_(flags, op=hvd.Sum, name="trainkit.used")

    def _end_flags(self, handle: Any) -> None:
        hvd.synchronize(handle)


class Contiguous:
    """A Horovod `Compression` that compresses nothing: it carries channels_last and bfloat16 over the wire."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return what Horovod can send, and the tensor to restore it to."""
        wire = tensor if tensor.dtype in _ALLREDUCE_TYPES else tensor.to(torch.float32)
        return wire.contiguous(), tensor

    @staticmethod
    def decompress(wire: Tensor, tensor: Tensor) -> Tensor:
        """Return the sum in the dtype and layout of `tensor`."""
        same = wire.dtype == tensor.dtype and wire.stride() == tensor.stride()
        return wire if same else torch.empty_like(tensor).copy_(wire)


_STOCK_MARK = "_hooked_by_horovod"  # on parameters that hvd.DistributedOptimizer will not let go of


class StockReducer:
    """The stock `hvd.DistributedOptimizer`, used for its summing alone."""

    def __init__(
        self, trained: list[NamedParameter], frozen: list[NamedParameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Wrap each optimizer.

        Raises:
            ConfigError: for what the stock wrapper would get wrong in silence.
        """
        if frozen:
            raise ConfigError(
                f"engine.optimizer_wrapper is 'horovod', and '{frozen[0][0]}' is frozen: hvd.DistributedOptimizer would "
                "never sum it once it is unfrozen. Use engine.optimizer_wrapper=trainkit."
            )
        if any(hasattr(p, _STOCK_MARK) for _, p in trained):
            raise ConfigError(
                "engine.optimizer_wrapper is 'horovod', and this model was trained with it before: hvd.DistributedOptimizer "
                "cannot take its hooks off. Make a new Task, or use engine.optimizer_wrapper=trainkit."
            )
        for _, parameter in trained:
            setattr(parameter, _STOCK_MARK, True)
        self._wrapped = []
        for optimizer in optimizers:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            named = [(n, p) for n, p in trained if p in own]
            self._wrapped.append(
                hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=Contiguous, op=hvd.Sum)
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let Horovod's hooks wait for one backward more."""
        self._set_passes(2)
        try:
            yield
        finally:
            self._set_passes(1)

    def finish(self) -> None:
        """Wait for the sums; the user's own optimizer takes the step."""
        for wrapped in self._wrapped:
            wrapped.synchronize()

    def remove(self) -> None:
        """Horovod has no way to take its hooks off; they go with the parameters."""

    def _set_passes(self, passes: int) -> None:
        for wrapped in self._wrapped:
            wrapped.set_backward_passes_per_step(passes)


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Name a collective that failed because another rank is gone."""
    try:
        yield
    except HorovodInternalError as error:
        raise PeerError(f"Another rank ended or sent something else: {error}") from error
