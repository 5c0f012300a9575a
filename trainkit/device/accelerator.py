"""What accelerators share, by torch's names for all of them (torch.Stream, torch.Event,
torch.accelerator), and what some lack.

cuda also names ROCm's GPUs, xpu those of Intel, mps those of Apple.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes beside the host: work is queued, and events mark it."""
    return device.type not in ("cpu", "meta")


def has_streams(device: torch.device) -> bool:
    """Return whether a device copies from and to pinned memory while it computes.

    mps has one stream, and no memory that is pinned for it; a copy that the host does not wait for
    may read what has been overwritten (pytorch#83015).
    """
    return is_accelerator(device) and device.type != "mps"


def mark(timed: bool = False) -> torch.Event:
    """Return an event behind the work that is queued on the accelerator's current stream."""
    event = torch.Event(enable_timing=timed)
    event.record()
    return event


@functools.cache
def wide(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64; float32 if it has none (mps, some xpu)."""
    if device.type == "xpu":
        has_it = torch.xpu.get_device_properties(device).has_fp64
    else:
        has_it = device.type != "mps"
    return torch.float64 if has_it else torch.float32


def empty_cache(device: torch.device) -> None:
    """Return the memory of a device that torch holds and no tensor needs."""
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


def name_of(device: torch.device) -> str:
    """Return the name of an accelerator's model; its kind if torch does not know it (mps)."""
    lookup = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if lookup is None else str(lookup(device))


@functools.cache
def generators() -> dict[str, Any]:
    """Return what has get_rng_state and set_rng_state of xpu or mps, by name, if torch sees one."""
    seen = torch.accelerator.current_accelerator(check_available=True)
    if seen is None or seen.type not in ("xpu", "mps"):
        return {}
    return {seen.type: torch.get_device_module(seen)}
