"""Which device a rank takes."""

from __future__ import annotations

import pytest
import torch

from trainkit.engine.pinning import pin_device
from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import Launcher


def device_on(
    local_rank: int,
    local_size: int,
    gpus: int,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "auto",
) -> torch.device:
    """The device of a local rank on a host with this many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ranks = Ranks(Launcher("none", local_rank, local_size, local_rank, local_size))
    return pin_device(device, ranks)  # type: ignore[arg-type]


def test_a_rank_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 2 of 4 computes on cuda:2."""
    assert device_on(2, 4, gpus=4, monkeypatch=monkeypatch) == torch.device("cuda", 2)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a host with one GPU are refused."""
    with pytest.raises(EngineError, match="runs 2 ranks and has 1 GPU; each rank needs its own"):
        device_on(0, 2, gpus=1, monkeypatch=monkeypatch)


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows each rank its own GPU:
    with TRAINKIT_GPU=0 local rank 2 of 4 takes cuda:0, and one GPU is enough.
    """
    monkeypatch.setenv("TRAINKIT_GPU", "0")
    assert device_on(2, 4, gpus=1, monkeypatch=monkeypatch) == torch.device("cuda", 0)


def test_without_gpus_the_cpu_is_taken_unless_cuda_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """auto falls back to the CPU; cuda does not."""
    assert device_on(0, 1, gpus=0, monkeypatch=monkeypatch) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        device_on(0, 1, gpus=0, monkeypatch=monkeypatch, device="cuda")


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with more ranks than cores, each computes with one thread,
    unless OMP_NUM_THREADS is set.
    """
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    device_on(0, 10_000, gpus=0, monkeypatch=monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    device_on(0, 10_000, gpus=0, monkeypatch=monkeypatch)
    assert chosen == [1]
