"""Measurements of gpu.py on a GPU: its ceilings, and a step's work by torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_training import synchronize
from trainkit import Callback

# Calls that make the host wait. cudaMemcpyAsync to the host's pageable memory does too; torch
# follows it by one of these.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WINDOW = "benchmark window"


def matmul_flops(device: torch.device, size: int) -> float:
    """Return FLOP/s of the product of two bf16 matrices, the best of 5 x 10."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _best(lambda: torch.mm(a, b), device)


def copy_bytes(device: torch.device, size: int) -> float:
    """Return bytes/s, read and written, of a copy on the device, the best of 5 x 10."""
    a = torch.empty(size, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * size / _best(lambda: b.copy_(a), device)


def _best(work: Any, device: torch.device) -> float:
    taken = []
    for _ in range(6):
        before = synchronize(device)
        for _ in range(10):
            work()
        taken.append((synchronize(device) - before) / 10)
    return min(taken[1:])


@dataclass
class Profile:
    """The work of some steps.

    Attributes:
        steps: their number.
        waits: calls of the host that wait for the device.
        kernels: name -> microseconds.
        launches: number of kernels.
        beside_us: work on other streams than the busiest (sums of gradients, copies of batches), in
            microseconds.
        overlapped_us: of it, while the busiest was busy too.
    """

    steps: int
    waits: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    beside_us: float = 0.0
    overlapped_us: float = 0.0

    @property
    def overlap(self) -> float | None:
        """The overlapped share of the work on other streams."""
        return self.overlapped_us / self.beside_us if self.beside_us else None

    def dominant(self, number: int) -> list[tuple[str, float]]:
        """Return the kernels that take longest:
        their names, shortened, and shares of the time of all.
        """
        whole = sum(self.kernels.values()) or 1.0
        return [(_short(name), taken / whole) for name, taken in self.kernels.most_common(number)]


class Profiled(Callback):
    """Profiles the steps from one on to another, of a training that ends after it."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.profile: Profile | None = None

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Begin, or end."""
        if trainer.global_step == self.first:
            self.window = Window(trainer.engine.device)
        if trainer.global_step == self.last:
            self.profile = self.window.end(self.last - self.first)


class Window:
    """torch's profiler, running."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        synchronize(device)
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profiler, self._mark = profile(activities=kinds), record_function(_WINDOW)
        self._profiler.__enter__()
        self._mark.__enter__()

    def end(self, steps: int) -> Profile:
        """Stop it, and return the profile."""
        self._mark.__exit__(None, None, None)
        synchronize(self.device)  # outside of the window: it is not the steps' own
        self._profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(path))
            profile = read(json.loads(path.read_text())["traceEvents"], steps)
        if self.device.type == "cuda" and not profile.launches:
            raise RuntimeError(
                "torch's profiler saw no kernel, so it cannot count waits: does this user have"
                " CUPTI's rights?"
            )
        return profile


def read(events: Sequence[dict[str, Any]], steps: int) -> Profile:
    """Return the profile of the window in a trace in Chrome's format."""
    profile = Profile(steps)
    (window,) = [
        e for e in events if e.get("name") == _WINDOW and e.get("cat") == "user_annotation"
    ]
    streams: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        inside = window["ts"] <= event.get("ts", -1.0) <= window["ts"] + window["dur"]
        if event.get("cat") == "cuda_runtime" and inside:
            profile.waits += event["name"] in WAITS
        # the device runs behind the host: count all kernels launched in the window
        if event.get("cat") in _ON_DEVICE:
            profile.kernels[event["name"]] += event["dur"]
            profile.launches += 1
            streams[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
    if streams:
        busiest = max(
            streams, key=lambda stream: sum(end - begin for begin, end in streams[stream])
        )
        main = sorted(streams.pop(busiest))
        for begin, end in (span for spans in streams.values() for span in spans):
            profile.beside_us += end - begin
            profile.overlapped_us += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in main)
    return profile


def _short(name: str) -> str:
    """Return a kernel's name without its template arguments."""
    return re.sub(r"^void |<.*|\(.*", "", name)[:60] or name[:60]
