"""Bytes of the tensors that are alive, operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.device.shards import local_of


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context the memory of each tensor that an operation makes counts until it is
    freed. What an operation allocates for itself alone is not seen.

    Attributes:
        bytes: of the tensors that are alive.
        peak: the largest number since it was set to `bytes`.

    Args:
        apart: tensors that do not count.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._alive: dict[int, int] = {}
        self._apart = {_memory_of(tensor)._cdata for tensor in apart}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it makes."""
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return outputs

    def add(self, tensor: Tensor) -> None:
        """Count a tensor, unless its memory is counted."""
        if tensor.layout is torch.sparse_coo:
            self.add(tensor._indices())
            self.add(tensor._values())
            return
        memory = _memory_of(tensor)
        key = memory._cdata
        if key in self._alive or key in self._apart:
            return
        size = self._alive[key] = memory.nbytes()
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(memory, self._free, key)

    def _free(self, key: int) -> None:
        self.bytes -= self._alive.pop(key, 0)


def _memory_of(tensor: Tensor) -> torch.UntypedStorage:
    return local_of(tensor).untyped_storage()
