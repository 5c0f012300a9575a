"""Horovod's engine on a pretended GPU: what a build can sum there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.engine.horovod import engine
from trainkit.engine.horovod.engine import HorovodEngine
from trainkit.errors import EngineError


def entered(
    monkeypatch: pytest.MonkeyPatch, device: str, *parts: str, uuid: str = ""
) -> torch.device:
    """Enter the engine of one rank on a host with one GPU, with Horovod built with these parts;
    or of two ranks that see GPU-1 and the GPU with this UUID.
    """
    horovod: Any = SimpleNamespace(
        is_initialized=lambda: True,
        **{f"{part}_built": lambda part=part: part in parts for part in ("nccl", "cuda", "rocm")},
    )
    monkeypatch.setattr(engine, "hvd", horovod)
    monkeypatch.setattr(HorovodEngine, "_connect", lambda self: None)
    monkeypatch.setattr(engine.HorovodCollectives, "narrow", lambda self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    chosen = HorovodEngine(device=device)  # type: ignore[arg-type]
    if uuid:
        chosen.ranks.assign(0, 2, 0, 2)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")
        )
        chosen.comm.all_gather_object = lambda value: [value, (value[0], uuid)]  # type: ignore[method-assign]
        monkeypatch.setattr(HorovodEngine, "_check_adasum", lambda self: None)
    with chosen:
        return chosen.device


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_build_for_cpus_takes_no_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its background thread would end at the first sum, and each rank would blame another; auto
    does not fall back to the CPU in silence.
    """
    with pytest.raises(
        EngineError,
        match=f"engine.device is '{device}'.*without CUDA and NCCL.*horovod install --gpu.*"
        r"engine=ddp.*engine\.device=cpu",
    ):
        entered(monkeypatch, device)
    assert entered(monkeypatch, "cpu") == torch.device("cpu")


@pytest.mark.parametrize("part", ["nccl", "cuda", "rocm"])
def test_a_build_for_gpus_takes_one(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """With NCCL, or with CUDA or ROCm alone, the rank computes on its GPU."""
    assert entered(monkeypatch, "auto", part) == torch.device("cuda", 0)


def test_ranks_that_see_one_gpu_each_compare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are cuda:0; it is two GPUs, or the same one, which is refused."""
    assert entered(monkeypatch, "auto", "nccl", uuid="GPU-2") == torch.device("cuda", 0)
    with pytest.raises(EngineError, match="runs 2 ranks and has 1 GPU; each rank needs its own"):
        entered(monkeypatch, "auto", "nccl", uuid="GPU-1")
