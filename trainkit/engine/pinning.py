"""Which device a rank computes on.

A launcher shows each rank all GPUs of its host, and the rank takes that of its local rank; or
(srun --gpus-per-task=1, a script that sets CUDA_VISIBLE_DEVICES) one each, which is then the rank's
own. Two ranks that see the same single GPU are found by its UUID, when they have met.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Literal

import torch

from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import own_gpu

DeviceName = Literal["auto", "cpu", "cuda", "xpu", "mps"]
Gpu = tuple[str, str]  # the name of a GPU's host, and its UUID; ("", "") for a rank on the CPU


def pin_device(requested: DeviceName, ranks: Ranks) -> torch.device:
    """Choose this rank's device by its local rank, and make it the current one.

    Ranks that share a host get an equal part of its cores as threads, unless OMP_NUM_THREADS is
    set; on GPUs too, if no launcher has bound them to some of the cores.

    "auto" takes CUDA's GPUs alone: others are requested by name, and have one rank.

    Raises:
        ConfigError: an accelerator was requested and there is none.
        EngineError: this host has more ranks than GPUs, and shows several of them to each rank.
    """
    if requested in ("xpu", "mps"):
        _require(requested, torch.get_device_module(requested).is_available())
        return torch.device(requested, 0)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and gpus == 0):
        _share_cores(ranks)
        return torch.device("cpu")
    _require("cuda", gpus > 0)
    if not sees_one_of_several(ranks) and own_gpu() is None and ranks.local_size > gpus:
        raise _too_few(ranks, gpus)
    device = torch.device("cuda", 0 if sees_one_of_several(ranks) else ranks.gpu_index)
    torch.cuda.set_device(device)
    if len(os.sched_getaffinity(0)) == os.cpu_count():
        _share_cores(ranks)
    return device


def _share_cores(ranks: Ranks) -> None:
    if ranks.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # horovodrun leaves each rank a thread per core of the whole host: they would compete for
        # the cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_size))


def _require(kind: str, is_there: bool) -> None:
    if not is_there:
        raise ConfigError(
            f"engine.device is '{kind}', but torch sees no GPU here of this kind. Use"
            " engine.device=cpu."
        )


def sees_one_of_several(ranks: Ranks) -> bool:
    """Return whether this rank sees one GPU and shares its host with others: the GPU may be its
    own, or one for all. `require_own` finds out.
    """
    return own_gpu() is None and ranks.local_size > 1 and torch.cuda.device_count() == 1


def gpu_of(device: torch.device) -> Gpu:
    """Return what identifies a rank's GPU among those of all ranks."""
    if device.type != "cuda":
        return "", ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return socket.gethostname(), str(uuid)


def require_own(ranks: Ranks, own: Gpu, others: Sequence[Gpu]) -> None:
    """Refuse a GPU that another rank computes on.

    Args:
        ranks: this rank's place.
        own: this rank's GPU, see gpu_of.
        others: those of other ranks.

    Raises:
        EngineError: one of them has this rank's GPU.
    """
    if own[1] and own in others:
        raise _too_few(ranks, 1)


def _too_few(ranks: Ranks, gpus: int) -> EngineError:
    return EngineError(
        f"This host runs {ranks.local_size} ranks and has {gpus} GPU{'s' if gpus > 1 else ''};"
        " each rank needs its own. Start fewer ranks (-np, --nproc-per-node), ask for one GPU for"
        " each (srun --gpus-per-task=1), or use engine.device=cpu."
    )
