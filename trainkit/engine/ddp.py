"""torch.distributed behind the wall: the only file that imports it.

Gradients are summed in buckets of about 25 MB while backward runs, as torch's own DistributedDataParallel does (Li et
al. 2020, section 3.2.3), but by hooks on the parameters: the user's `training_step` needs no wrapper around the model,
and a rank without a sample in a step takes part with zeros.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see _leave
from torch import Tensor, nn

from trainkit.arguments import PositiveFloat, checked
from trainkit.engine.base import Device, Engine, PeerError, dense_view, send_optimizer_state, tensors_of
from trainkit.engine.reducer import Bucket, GradientReducer, NamedParameter, split_frozen
from trainkit.errors import EngineError


@checked
class DDPEngine(Engine):
    """Ranks that torchrun (or anything that sets its variables) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank where there are GPUs.
        bucket_cap_mb: size of a bucket of gradients, in MiB. Smaller buckets start earlier, larger ones cost fewer calls.
    """

    name = "ddp"
    config_key = "engine"

    def __init__(self, device: Device = "auto", bucket_cap_mb: PositiveFloat = 25.0) -> None:
        super().__init__(device)
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._reducer: BucketReducer | None = None

    def _start(self) -> None:
        if self.launcher.name != "torchrun":
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
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        self._pin_device()
        if not dist.is_initialized():
            on_gpu = self.device.type == "cuda"
            with _peers():
                dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)
            atexit.register(_leave)

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Engine."""
        self.release()
        self.broadcast_tensors(tensors_of(model))
        send_optimizer_state(self, optimizers)
        if self.world_size > 1:
            trained, frozen = split_frozen(model.named_parameters())
            self._reducer = BucketReducer(make_buckets(trained, self._bucket_bytes), frozen, in_order=True)

    def release(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See Engine."""
        return self._reducer.no_sync() if self._reducer is not None else contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            with _peers():
                self._reducer.finish()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Engine."""
        total = tensor.detach().clone().contiguous()
        with _peers():
            dist.all_reduce(total)
        return total

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Engine."""
        if self.world_size == 1:
            return
        sent: list[tuple[Any, Tensor, Tensor]] = []
        with _peers():
            for tensor in tensors:
                flat = dense_view(tensor)
                held = tensor.contiguous().reshape(-1) if flat is None else flat
                sent.append((dist.broadcast(held.view(torch.uint8), src=0, async_op=True), held, tensor))
            for work, held, tensor in sent:
                work.wait()
                if held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held.reshape(tensor.shape))

    def broadcast_object(self, value: Any) -> Any:
        """See Engine."""
        box = [value]
        with _peers():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Engine."""
        values: list[Any] = [None] * self.world_size
        with _peers():
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """See Engine."""
        with _peers():
            dist.barrier()


class BucketReducer(GradientReducer):
    """Each bucket's gradients as one flat buffer and one asynchronous all_reduce; `.grad` becomes a view of it."""

    def _start(self, bucket: Bucket) -> Any:
        pieces = []
        for _, parameter in bucket.entries:
            grad = parameter.grad
            assert grad is not None
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.stride() != parameter.stride():  # all ranks must send their elements in the same order
                grad = torch.empty_like(parameter).copy_(grad)
            flat = dense_view(grad)
            pieces.append(grad.reshape(-1) if flat is None else flat)
        buffer = torch.cat(pieces)
        return dist.all_reduce(buffer, async_op=True), buffer

    def _end(self, bucket: Bucket) -> None:
        work, buffer = bucket.handle
        work.wait()
        start = 0
        for _, parameter in bucket.entries:
            piece = buffer[start : start + parameter.numel()]
            start += parameter.numel()
            dense = dense_view(parameter.detach()) is not None
            parameter.grad = (
                piece.as_strided(parameter.size(), parameter.stride()) if dense else piece.reshape(parameter.size())
            )

    def _start_flags(self, flags: Tensor) -> Any:
        return dist.all_reduce(flags, async_op=True)

    def _end_flags(self, handle: Any) -> None:
        handle.wait()


def make_buckets(trained: list[NamedParameter], bucket_bytes: int) -> list[list[NamedParameter]]:
    """Group parameters, the last layers first (backward reaches them first), by dtype, up to `bucket_bytes` a bucket."""
    buckets: list[list[NamedParameter]] = []
    held = 0
    for name, parameter in reversed(trained):
        size = parameter.numel() * parameter.element_size()
        if not buckets or buckets[-1][0][1].dtype != parameter.dtype or held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append((name, parameter))
        held += size
    return buckets


def _leave() -> None:
    """End the group, and with it Gloo's threads, before the interpreter ends.

    A thread that lives until then may ask for Python's lock, to let go of a tensor, and abort the process. The threads
    end with the last reference to the group. torch.distributed.nn.functional holds the group of the time at which it is
    imported, as its functions' default, for ever, and the first step of an optimizer imports it: hence our import of it
    before there is a group.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Name a collective that failed because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"Another rank ended or sent something else: {error}") from error
