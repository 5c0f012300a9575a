"""Which device a rank takes."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainkit.engine.ddp import collectives
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.pinning import gpu_of, pin_device, require_own
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


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    """Show one GPU with this UUID."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )


def test_a_rank_takes_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 2 of 4 computes on cuda:2."""
    assert device_on(2, 4, gpus=4, monkeypatch=monkeypatch) == torch.device("cuda", 2)


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on a host with two GPUs are refused."""
    with pytest.raises(EngineError, match="runs 4 ranks and has 2 GPUs; each rank needs its own"):
        device_on(0, 4, gpus=2, monkeypatch=monkeypatch)


@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_rank_that_sees_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    """srun --gpus-per-task=1 shows each of four ranks of a host its own GPU, as cuda:0."""
    assert device_on(local_rank, 4, gpus=1, monkeypatch=monkeypatch) == torch.device("cuda", 0)


@pytest.mark.parametrize(("other", "is_refused"), [("GPU-1", True), ("GPU-2", False)])
def test_ranks_that_see_one_gpu_compare_it(
    monkeypatch: pytest.MonkeyPatch, other: str, is_refused: bool
) -> None:
    """Two ranks with the same UUID are refused before NCCL starts; with two GPUs they start."""
    started: list[dict[str, Any]] = []
    store = dist.HashStore()
    pretend_gpu(monkeypatch, "GPU-1")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: started.append(given))
    monkeypatch.setattr(collectives.atexit, "register", lambda function, *given: None)
    comm = DDPCollectives(Ranks(Launcher("torchrun", 0, 2, 0, 2)), Heartbeat())
    dist.PrefixStore("trainkit/0", store).set(f"gpu/{socket.gethostname()}/1", other)
    if is_refused:
        with pytest.raises(EngineError, match="runs 2 ranks and has 1 GPU; each rank needs its"):
            comm.connect(torch.device("cuda", 0))
    else:
        comm.connect(torch.device("cuda", 0))
        assert (started[0]["rank"], started[0]["world_size"]) == (0, 2)
    assert len(started) == (not is_refused)


def test_the_same_gpu_of_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's ranks gather theirs; ranks on the CPU, and a torch that knows no UUID, pass."""
    ranks = Ranks(Launcher("horovodrun", 0, 2, 0, 2))
    pretend_gpu(monkeypatch, "GPU-1")
    own = gpu_of(torch.device("cuda", 0))
    assert own == (socket.gethostname(), "GPU-1")
    with pytest.raises(EngineError, match="has 1 GPU; each rank needs its own"):
        require_own(ranks, own, [own])
    require_own(ranks, own, [(own[0], "GPU-2"), ("other", "GPU-1")])
    require_own(ranks, gpu_of(torch.device("cpu")), [("", "")])


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


@pytest.mark.parametrize("gpus", [0, 10_000])
def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """On the CPU as beside GPUs, with more ranks than cores, each has one thread, unless
    OMP_NUM_THREADS is set.
    """
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(os.cpu_count() or 1))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    device_on(0, 10_000, gpus=gpus, monkeypatch=monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    device_on(0, 10_000, gpus=gpus, monkeypatch=monkeypatch)
    assert chosen == [1]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range((os.cpu_count() or 1) + 1))
    device_on(0, 10_000, gpus=10_000, monkeypatch=monkeypatch)
    assert chosen == [1], "bound by a launcher, the cores are the rank's own"
