"""Tensors that all ranks have whole, spread over them as another one is (engine=fsdp)."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor


def spread_as(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that all ranks have whole, spread over them as `like` is; sends nothing."""
    # importing it takes a second, and `like` has done so
    parts: Any = importlib.import_module("torch.distributed.tensor")
    spread: Any = like
    copies = [parts.Replicate()] * spread.device_mesh.ndim
    everywhere = parts.DTensor.from_local(whole, spread.device_mesh, copies, run_check=False)
    tensor: Tensor = everywhere.redistribute(placements=spread.placements)
    return tensor
