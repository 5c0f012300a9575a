"""Packing: a tree of plain values and tensors as bytes, for the other ranks of this run and for the memory of this process.

Tensors go as their bytes: torch's own pickling of a tensor takes a hundred times as long as that of a small tensor's bytes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor of the host to its bytes; leave all else as it is."""
        if type(value) is not Tensor or value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def pack(tree: Any) -> bytes:
    """Return a tree as bytes. Tensors come back contiguous."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(tree)
    return file.getvalue()


def unpack(packed: bytes | memoryview) -> Any:
    """Return what was packed, as the caller's own; of bytes that this run has packed alone, since unpickling runs code."""
    return pickle.loads(packed)
