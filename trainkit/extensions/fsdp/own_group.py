"""A group of ranks beside those of torch.distributed, which knows nothing of it: it is made while
torch's groups of other ranks stay, and ends with its last reference.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OwnGroup:
    """Ranks that meet by a store. Gloo sums and sends what is on the host, NCCL what is on a GPU.

    Attributes:
        rank, size: of this process among them.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int, on_gpu: bool) -> None:
        self.rank, self.size = rank, size
        timeout = dist.distributed_c10d.default_pg_timeout
        own: Any = dist.PrefixStore(f"{name}/gloo", store)  # type: ignore[attr-defined]
        self._gloo: Any = dist.ProcessGroupGloo(own, rank, size, timeout)
        self._nccl: Any = None
        if on_gpu:  # has not run yet
            nccl: Any = dist.ProcessGroupNCCL
            own = dist.PrefixStore(f"{name}/nccl", store)  # type: ignore[attr-defined]
            self._nccl = nccl(own, rank, size, nccl.Options())

    def _of(self, tensor: Tensor) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo

    def start_sum(self, tensor: Tensor) -> Any:
        """Start to sum a tensor in place; return what waits."""
        return self._of(tensor).allreduce([tensor])

    def start_broadcast(self, tensor: Tensor) -> Any:
        """Start to overwrite a tensor with the first rank's; return what waits."""
        return self._of(tensor).broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        self._of(tensor).allgather([everyone], [tensor]).wait()
        return everyone

    def broadcast_object(self, value: Any) -> Any:
        """Return the first rank's value on all. The value is pickled."""
        own = _packed(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([own.numel()])
        self.start_broadcast(size).wait()
        packed = own if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        self.start_broadcast(packed).wait()
        return value if self.rank == 0 else _unpacked(packed)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks. The values are pickled."""
        own = _packed(value)
        sizes = [int(size) for size in self.gather(torch.tensor([own.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = self.gather(padded)
        return [_unpacked(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._gloo.barrier().wait()

    def abort(self) -> None:
        """End NCCL's waiting; Gloo's is ended by its sockets (ddp/sockets.py)."""
        if self._nccl is not None:
            self._nccl.abort()


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
