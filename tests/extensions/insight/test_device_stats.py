"""DeviceStats: available values are read, the others are absent."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.extensions.insight.device_stats import DeviceStats

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
UUID = "d0df4a8c-8a3b-11ee-b9d1-0242ac120002"


class NVMLError(Exception):
    """Stands for NVML's own."""


class Fake(ModuleType):
    """Stands for pynvml on a host with one GPU; the calls in `fails` are not supported there."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *fails: str) -> None:
        super().__init__("pynvml")
        self.fails = fails

    def _say(self, name: str, value: Any) -> Any:
        if name in self.fails:
            raise NVMLError(f"{name}: not supported")
        return value

    def nvmlInit(self) -> None:
        """Start."""
        self._say("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        """Find the GPU."""
        assert uuid == f"GPU-{UUID}"
        return str(self._say("nvmlDeviceGetHandleByUUID", "handle"))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        """Return it."""
        return self._say("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=3, total=10))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        """Return it."""
        return self._say("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=75, memory=1))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        """Return it."""
        return int(self._say("nvmlDeviceGetTemperature", 61))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        """Return it."""
        return int(self._say("nvmlDeviceGetPowerUsage", 345_600))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sees a second GPU, on which this process holds memory."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID)
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6)


def read(monkeypatch: pytest.MonkeyPatch, fake: ModuleType | None) -> dict[str, float]:
    """Return the GPU's values."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return DeviceStats(GPU).of_gpu()


ALL = {
    "gpu_memory_used_bytes": 3.0,
    "gpu_memory_total_bytes": 10.0,
    "gpu_utilization_ratio": 0.75,
    "gpu_temperature_celsius": 61.0,
    "gpu_power_watts": 345.6,
}
TORCHS = {"gpu_memory_allocated_bytes": 5.0, "gpu_memory_reserved_bytes": 6.0}


def test_a_gpu_is_read_in_the_units_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts per cent and milliwatts; the names say a ratio and watts.
    Torch's own memory is beside it.
    """
    assert read(monkeypatch, Fake()) == ALL | TORCHS


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ("nvmlDeviceGetMemoryInfo", {"gpu_memory_used_bytes", "gpu_memory_total_bytes"}),
        ("nvmlDeviceGetUtilizationRates", {"gpu_utilization_ratio"}),
        ("nvmlDeviceGetTemperature", {"gpu_temperature_celsius"}),
        ("nvmlDeviceGetPowerUsage", {"gpu_power_watts"}),
        ("nvmlDeviceGetHandleByUUID", set(ALL)),
        ("nvmlInit", set(ALL)),
    ],
)
def test_what_a_driver_does_not_tell_is_absent(
    monkeypatch: pytest.MonkeyPatch, call: str, lost: set[str]
) -> None:
    """The rest is there."""
    assert set(read(monkeypatch, Fake(call))) == (set(ALL) | set(TORCHS)) - lost


def test_without_nvml_torch_still_knows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is no error."""
    assert read(monkeypatch, None) == TORCHS


def test_a_gpu_on_which_another_process_computes_has_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zeros would look like a rank that holds nothing."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    assert read(monkeypatch, Fake()) == ALL


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("xpu", ("memory_allocated", "memory_reserved")),
        ("mps", ("current_allocated_memory", "driver_allocated_memory")),
    ],
)
def test_other_accelerators_tell_what_this_process_holds(
    monkeypatch: pytest.MonkeyPatch, kind: str, names: tuple[str, str]
) -> None:
    """By torch, which has its own names for mps; NVML is not asked."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for name, value in zip(names, (5, 6), strict=True):
        monkeypatch.setattr(torch.get_device_module(kind), name, lambda *_, value=value: value)
    assert DeviceStats(torch.device(kind)).of_gpu() == TORCHS


def test_what_is_called_is_there_in_the_real_package() -> None:
    """The stand-in's names are those of nvidia-ml-py."""
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = {
        name
        for name in {**vars(Fake), **vars(real)}
        if name in vars(Fake) and name.lower().startswith("nvml")
    }
    assert len(names) >= 8
    assert [name for name in names if not hasattr(real, name)] == []


def test_the_host_is_read_as_plain_floats() -> None:
    """Memory in bytes, load as a ratio; no GPU on a CPU."""
    pytest.importorskip("psutil", reason="psutil is not installed")
    values = DeviceStats(CPU).read()
    names = {
        "host_memory_used_bytes",
        "host_memory_total_bytes",
        "process_memory_bytes",
        "cpu_utilization_ratio",
    }
    assert set(values) == names
    assert all(type(value) is float for value in values.values())
    assert 0 < values["process_memory_bytes"] < values["host_memory_total_bytes"]
    assert 0 < values["host_memory_used_bytes"] <= values["host_memory_total_bytes"]


def test_the_load_is_that_since_it_was_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any thread: 30 of 40 seconds of all cores were busy, then none of 10."""
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    times_s = [(0.0, 0.0, 0.0), (20.0, 10.0, 10.0), (20.0, 10.0, 20.0), (20.0, 10.0, 20.0)]
    times = iter(
        [
            SimpleNamespace(
                _asdict=lambda t=t: dict(zip(("user", "system", "idle"), t, strict=True))
            )
            for t in times_s
        ]
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(times))
    stats = DeviceStats(CPU)
    assert [stats.of_host()["cpu_utilization_ratio"] for _ in range(3)] == [0.75, 0.0, 0.0]


def test_without_psutil_nothing_is_read_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is no error."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert DeviceStats(CPU).read() == {}
