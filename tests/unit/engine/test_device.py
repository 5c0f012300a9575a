"""Which device a rank takes."""

from __future__ import annotations

import pytest
import torch

from trainkit.engine.single import SingleEngine
from trainkit.errors import ConfigError, EngineError


def engine_on(
    local_rank: int, local_size: int, gpus: int, monkeypatch: pytest.MonkeyPatch, device: str = "auto"
) -> SingleEngine:
    """An engine of this place on a host with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    engine = SingleEngine(device)  # type: ignore[arg-type]
    engine.local_rank, engine.local_size = local_rank, local_size
    return engine


def test_a_rank_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 2 of 4 computes on cuda:2."""
    engine = engine_on(2, 4, gpus=4, monkeypatch=monkeypatch)
    engine._pin_device()
    assert engine.device == torch.device("cuda", 2)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a host with one GPU are told so."""
    with pytest.raises(EngineError, match="runs 2 ranks and has 1 GPU; each rank needs its own"):
        engine_on(0, 2, gpus=1, monkeypatch=monkeypatch)._pin_device()


def test_without_gpus_the_cpu_is_taken_unless_cuda_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto falls back to the CPU; cuda does not."""
    engine = engine_on(0, 1, gpus=0, monkeypatch=monkeypatch)
    engine._pin_device()
    assert engine.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        engine_on(0, 1, gpus=0, monkeypatch=monkeypatch, device="cuda")._pin_device()


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU each of more ranks than cores computes with one thread, unless OMP_NUM_THREADS says otherwise."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine_on(0, 10_000, gpus=0, monkeypatch=monkeypatch)._pin_device()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    engine_on(0, 10_000, gpus=0, monkeypatch=monkeypatch)._pin_device()
    assert chosen == [1]
