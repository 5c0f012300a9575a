"""A rank's file of a copy: a safetensors file as views of the tensors' own memory.

safetensors writes one under Python's lock, which would stop the step under way for as long as the
copying takes; hashing and sending views do not hold it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

LENGTH = 8  # bytes before the header: the header's length


class Span(NamedTuple):
    """Where a tensor is in a file: its first byte, and the one after its last."""

    start: int
    end: int


def as_file(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return a file's content, piece by piece; it shares the memory of contiguous tensors, which must
    be on the host.
    """
    # as safetensors writes them: each begins at a multiple of its elements' size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    views = list[memoryview]()
    at = 0
    for name in names:
        tensor = tensors[name].contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        header[name] = {
            "dtype": _dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + data.nbytes],
        }
        views.append(memoryview(data))  # type: ignore[arg-type]
        at += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)
    return [memoryview(len(text).to_bytes(LENGTH, "little") + text), *views]


def spans_in(header: bytes, keys: Sequence[str]) -> list[Span]:
    """Return where tensors are, by a file's header, without its length."""
    table = json.loads(header)
    begin = LENGTH + len(header)
    return [Span(*(begin + offset for offset in table[key]["data_offsets"])) for key in keys]


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name in a header."""
    content = safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(content[LENGTH:])["x"]["dtype"])
