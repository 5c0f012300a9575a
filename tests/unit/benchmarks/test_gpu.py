"""The GPU's benchmark, as far as it can be seen without one:
time that is over, a profiler that sees nothing, shared memory.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_profile
from benchmarks.gpu_training import RESNET

CPU = torch.device("cpu")


def bench(seconds: float, out: Path | None = None) -> gpu.Bench:
    """Return the parts, none of them begun."""
    return gpu.Bench(CPU, False, out, seconds)


def test_a_part_that_takes_too_long_is_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before it stays, and so does the file; no alarm is left behind."""
    monkeypatch.setattr(gpu, "GRACE_S", 0.1)
    parts = bench(0.0, tmp_path / "out.json")
    parts.attempt("long", lambda: time.sleep(60))
    assert parts.findings.missing["long"].startswith("TimeoutError: it was ended after 0 s")
    assert "TimeoutError" in (tmp_path / "out.json").read_text()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_profiler_without_kernels_is_no_proof_of_no_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where CUPTI says nothing, zero waits were counted of nothing."""
    assert gpu_profile.Window(CPU).end(1).launches == 0
    window = gpu_profile.Window(CPU)
    window.device = torch.device("cuda", 0)
    monkeypatch.setattr(gpu_profile, "synchronize", lambda device: 0.0)
    with pytest.raises(RuntimeError, match="saw no kernel"):
        window.end(1)


@pytest.mark.parametrize(("gigabytes", "workers"), [(0.064, None), (1.0, 2), (999.0, 16)])
def test_workers_have_room_in_shared_memory(
    gigabytes: float, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's 64 MB are reported before a worker dies of them; less room means fewer workers."""
    usage: Any = SimpleNamespace(free=int(gigabytes * 1e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    if workers is None:
        with pytest.raises(
            RuntimeError,
            match=r"/dev/shm has 64 MB free, and a worker needs 462 \(docker: --ipc=host\)",
        ):
            bench(1)._workers_with_room(RESNET)
    else:
        assert bench(1)._workers_with_room(RESNET) == workers
