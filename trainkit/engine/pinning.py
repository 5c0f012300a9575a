"""Which device a rank computes on."""

from __future__ import annotations

import os
from typing import Literal

import torch

from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import own_gpu

Device = Literal["auto", "cpu", "cuda"]


def pin_device(requested: Device, ranks: Ranks) -> torch.device:
    """Choose this rank's device by its local rank, and make it the current one.

    Ranks that share a host's CPU get an equal part of its cores as threads, unless OMP_NUM_THREADS
    is set.

    Raises:
        ConfigError: CUDA was requested and there is none.
        EngineError: this host has more ranks than GPUs, and shows all of them to each rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and gpus == 0):
        if ranks.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # horovodrun leaves each rank a thread per core of the whole host: they would compete
            # for the cores.
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_size))
        return torch.device("cpu")
    if gpus == 0:
        raise ConfigError(
            "engine.device is 'cuda', but torch sees no GPU here. Use engine.device=cpu."
        )
    if own_gpu() is None and ranks.local_size > gpus:
        raise EngineError(
            f"This host runs {ranks.local_size} ranks and has {gpus} GPU{'s' if gpus > 1 else ''};"
            " each rank needs its own. Start fewer ranks (-np, --nproc-per-node), or use"
            " engine.device=cpu."
        )
    device = torch.device("cuda", ranks.gpu_index)
    torch.cuda.set_device(device)
    return device
