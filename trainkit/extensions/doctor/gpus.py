"""GPUs, by NVML if available: also those that torch does not see, and the cause."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.extension import Finding
from trainkit.extensions.doctor.software import TorchSeen

AREA = "GPUs"
_GIB = 2**30
_DEVICES = Path("/dev")  # the driver lists its GPUs here, also if nvidia-ml-py is not installed


def look(torch: TorchSeen) -> Iterator[Finding]:
    """Yield the findings."""
    nvml = _nvml()
    seen = len(list(_DEVICES.glob("nvidia[0-9]*"))) if nvml is None else nvml.nvmlDeviceGetCount()
    if torch.gpus == 0 and seen == 0:
        yield Finding(AREA, "GPUs", "none: training runs on the CPU")
        return
    if nvml is not None:
        yield Finding(AREA, "driver", str(nvml.nvmlSystemGetDriverVersion()))
        yield from (finding for i in range(seen) for finding in _gpu(nvml, i))
    yield _seen(torch, seen)
    if torch.nccl is not None:
        yield Finding(AREA, "NCCL", f"{torch.nccl} (torch's)")


def _seen(torch: TorchSeen, there: int) -> Finding:
    if torch.gpus:
        return Finding(AREA, "torch sees", f"{torch.gpus}: {', '.join(sorted(set(torch.names)))}")
    if torch.cuda is None:
        why = "This torch was built without CUDA: it would train on the CPU."
        return Finding(
            AREA,
            "torch sees",
            "none",
            "wrong",
            why,
            "pip install --upgrade torch torchvision   (a CUDA build)",
        )
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        why = (
            f"CUDA_VISIBLE_DEVICES is '{os.environ['CUDA_VISIBLE_DEVICES']}', which hides all"
            f" {there}."
        )
        return Finding(AREA, "torch sees", "none", "wrong", why, "unset CUDA_VISIBLE_DEVICES")
    why = f"There are {there}; the driver is too old for CUDA {torch.cuda}, or incomplete."
    return Finding(
        AREA,
        "torch sees",
        "none",
        "wrong",
        why,
        "Update the driver, or install a torch for an older CUDA; see nvidia-smi.",
    )


def _gpu(nvml: Any, index: int) -> Iterator[Finding]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = str(nvml.nvmlDeviceGetName(handle))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used = memory.used / _GIB
        total = memory.total / _GIB
        text = f"{name}, {total:.0f} GiB, {used:.1f} GiB in use"
    except nvml.NVMLError:  # with memory that it shares with the CPU, or in parts (MIG)
        used = 0.0
        total = 0.0
        text = f"{name} (its memory is not reported)"
    if used > 0.1 * total:
        why = "Another process uses its memory."
        yield Finding(AREA, f"GPU {index}", text, "warning", why, "nvidia-smi lists the processes")
    else:
        yield Finding(AREA, f"GPU {index}", text)
    mode = _ask(nvml, "nvmlDeviceGetComputeMode", handle)
    if mode == getattr(nvml, "NVML_COMPUTEMODE_PROHIBITED", 2):
        why = "Its compute mode is 'prohibited': nothing can run on it."
        yield Finding(
            AREA,
            f"GPU {index} mode",
            "prohibited",
            "wrong",
            why,
            f"sudo nvidia-smi -i {index} -c DEFAULT",
        )
    slow = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    hot = getattr(nvml, "nvmlClocksThrottleReasonHwSlowdown", 8) | getattr(
        nvml, "nvmlClocksThrottleReasonSwThermalSlowdown", 32
    )
    if slow & hot:
        why = "It is throttled: too hot, or short of power. The other ranks will wait for it."
        yield Finding(
            AREA,
            f"GPU {index} clock",
            "throttled",
            "warning",
            why,
            f"nvidia-smi -q -d PERFORMANCE -i {index}",
        )


def _ask(nvml: Any, function: str, handle: Any) -> int | None:
    try:
        return int(getattr(nvml, function)(handle))
    except (AttributeError, nvml.NVMLError):  # not all GPUs and drivers report it
        return None


def _nvml() -> Any | None:
    """Return NVML, initialised; None without NVML or driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        # the package, the library or the driver is missing: each raises a different error
        return None
    return nvml
