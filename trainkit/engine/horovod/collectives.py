"""Horovod's collectives behind the wall: by name, within the process set, each with what a rank waits for in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import horovod.torch as hvd
import torch
from torch import Tensor

from trainkit.engine.base import Device
from trainkit.engine.horovod.elastic import SeatedEngine
from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES
from trainkit.engine.sending import dense_view


class HorovodCollectives(SeatedEngine):
    """The collectives of HorovodEngine but for the sums of gradients."""

    def __init__(self, device: Device = "auto") -> None:
        """All ranks take part, until the engine chooses."""
        super().__init__(device)
        self._ranks = hvd.global_process_set

    def _wait_for_all(self) -> None:
        if self._ranks is not hvd.global_process_set:
            with self._peers("the end of the process set's work"):
                hvd.barrier()

    def _all_reduce_of_statistics(self) -> Callable[[Tensor], Tensor]:
        # A name for each size: Horovod remembers what it has agreed on by name, and forgets it where the shape changes.
        return lambda tensor: self._sum(tensor, f"trainkit.statistics.{tensor.numel()}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Engine."""
        return self._sum(tensor, "trainkit.all_reduce")

    def _sum(self, tensor: Tensor, name: str) -> Tensor:
        wire = tensor.detach().reshape(-1)
        if wire.dtype not in ALLREDUCE_TYPES:
            wire = wire.to(torch.float32 if wire.is_floating_point() else torch.int64)
        with self._peers(name):
            total = hvd.allreduce(wire.contiguous(), op=hvd.Sum, name=name, process_set=self._ranks)
        result: Tensor = total.to(tensor.dtype).reshape(tensor.shape)
        return result

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Engine."""
        if self.world_size == 1:
            return
        sent: list[tuple[Any, Tensor, Tensor]] = []
        with self._peers("the broadcast of tensors"):
            for i, tensor in enumerate(tensors):
                flat = dense_view(tensor)
                held = tensor.contiguous().reshape(-1) if flat is None else flat
                wire = held.view(torch.uint8)
                handle = hvd.broadcast_async_(wire, self._root, f"trainkit.broadcast.{i}", process_set=self._ranks)
                sent.append((handle, held, tensor))
            for handle, held, tensor in sent:
                hvd.synchronize(handle)
                if held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held.reshape(tensor.shape))

    def broadcast_object(self, value: Any) -> Any:
        """See Engine."""
        with self._peers("the broadcast of an object"):
            return hvd.broadcast_object(value, self._root, name="trainkit.broadcast_object", process_set=self._ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Engine."""
        # hvd.allgather_object knows no process set.
        own = torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)
        with self._peers("the gathering of objects"):
            sizes = hvd.allgather(torch.tensor([len(own)]), name="trainkit.gather.sizes", process_set=self._ranks)
            everyone = hvd.allgather(own, name="trainkit.gather.bytes", process_set=self._ranks)
        return [cloudpickle.loads(piece.numpy().tobytes()) for piece in everyone.split(sizes.tolist())]

    def start_sum(self, number: int) -> Callable[[], int]:
        """See Engine."""
        what = "trainkit.sum.started"
        with self._peers(what):
            own = torch.tensor([number], dtype=torch.int64)
            handle = hvd.allreduce_async_(own, op=hvd.Sum, name=what, process_set=self._ranks)

        def wait() -> int:
            with self._peers(what):
                return int(hvd.synchronize(handle))

        return wait

    def start_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """See Engine."""
        what = "trainkit.gather.started"
        with self._peers(what):
            handle = hvd.allgather_async(own, name=what, process_set=self._ranks)

        def wait() -> Tensor:
            with self._peers(what):
                everyone: Tensor = hvd.synchronize(handle)
            return everyone

        return wait

    def barrier(self) -> None:
        """See Engine."""
        with self._peers("the barrier"):
            hvd.barrier(process_set=self._ranks)

    @property
    def _root(self) -> int:
        """Rank 0 of those that take part, as Horovod counts."""
        return 0 if self._ranks is hvd.global_process_set else int(self._ranks.ranks[0])
