"""DeviceStats: memory and load of this rank's GPU, its host and its process, as plain numbers.

Unavailable values are left out: there is no GPU, psutil (`pip install psutil`) or NVML's reader
(`pip install nvidia-ml-py`) is not installed, or a driver does not report a value. Nothing here
waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch

from trainkit.device.accelerator import is_accelerator


class DeviceStats:
    """Reads current values. The first `cpu_utilization_ratio` is of
    the time since this object was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._psutil = _find_psutil()
        self._nvml = _find_nvml() if device.type == "cuda" else None
        self._handle: Any = None
        if self._nvml is not None:
            self._handle = self._find(self._nvml)
        if self._psutil is not None:
            self._process = self._psutil.Process()
            self._cpu_before = self._cpu_times()

    def read(self) -> dict[str, float]:
        """Return the available values by name; a name ends with the unit.

        Returns:
            Of "gpu_memory_used_bytes" and "gpu_memory_total_bytes" (of the whole GPU, other
            processes included), "gpu_utilization_ratio" (0 to 1), "gpu_temperature_celsius",
            "gpu_power_watts", "gpu_memory_allocated_bytes" and "gpu_memory_reserved_bytes" (of this
            process, by torch), "host_memory_used_bytes", "host_memory_total_bytes",
            "process_memory_bytes", "cpu_utilization_ratio" (0 to 1, of all cores, since the last
            read).
        """
        return self.of_gpu() | self.of_host()

    def _find(self, nvml: ModuleType) -> Any:
        """Return NVML's handle of the device, by UUID:
        torch's index counts only the visible devices.
        """
        try:
            nvml.nvmlInit()
            return nvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            )
        except nvml.NVMLError:
            # no driver, or a part of a GPU (MIG), which has another kind of name
            return None

    def of_gpu(self) -> dict[str, float]:
        """Return the values of `read` with names that begin with gpu_."""
        return self._of_nvml() | self._of_torch()

    def _of_nvml(self) -> dict[str, float]:
        if self._nvml is None or self._handle is None:
            return {}
        nvml = self._nvml
        handle = self._handle
        values = dict[str, float]()
        readers: list[Callable[[], dict[str, float]]] = [
            lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
            lambda: {"gpu_utilization_ratio": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100},
            lambda: {
                "gpu_temperature_celsius": float(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                )
            },
            lambda: {"gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        ]
        for read in readers:
            # a card or a container may report only some of them
            with contextlib.suppress(nvml.NVMLError):
                values |= read()
        return values

    def _of_torch(self) -> dict[str, float]:
        """Return what this process holds; {} if another rank computes there."""
        if not is_accelerator(self._device):
            return {}
        of_kind: Any = torch.get_device_module(self._device)
        if self._device.type == "mps":
            allocated = of_kind.current_allocated_memory()
            reserved = of_kind.driver_allocated_memory()
        else:
            allocated = of_kind.memory_allocated(self._device)
            reserved = of_kind.memory_reserved(self._device)
        values = {
            "gpu_memory_allocated_bytes": float(allocated),
            "gpu_memory_reserved_bytes": float(reserved),
        }
        return values if reserved else {}

    def of_host(self) -> dict[str, float]:
        """Return the others."""
        if self._psutil is None:
            return {}
        memory = self._psutil.virtual_memory()
        before = self._cpu_before
        self._cpu_before = self._cpu_times()
        passed_s, idle_s = (now - then for now, then in zip(self._cpu_before, before, strict=True))
        return {
            "host_memory_used_bytes": float(memory.total - memory.available),
            "host_memory_total_bytes": float(memory.total),
            "process_memory_bytes": float(self._process.memory_info().rss),
            "cpu_utilization_ratio": (
                min(1.0, max(0.0, 1 - idle_s / passed_s)) if passed_s > 0 else 0.0
            ),
        }

    def _cpu_times(self) -> tuple[float, float]:
        """Return the seconds of all cores since the host was started, and the idle ones among them.

        psutil.cpu_percent stores the last call for each thread; the calling thread may change here.
        """
        assert self._psutil is not None
        times = self._psutil.cpu_times()._asdict()
        # they are in user and nice
        all_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return all_s, times["idle"] + times.get("iowait", 0.0)


def _memory(info: Any) -> dict[str, float]:
    return {"gpu_memory_used_bytes": float(info.used), "gpu_memory_total_bytes": float(info.total)}


def _find_psutil() -> ModuleType | None:
    try:
        import psutil
    except ImportError:
        return None
    return cast(ModuleType, psutil)


def _find_nvml() -> ModuleType | None:
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return None
    return cast(ModuleType, pynvml)
