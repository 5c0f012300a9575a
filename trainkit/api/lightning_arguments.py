"""Arguments of Lightning's that trainkit takes where they ask for what happens anyway, or for
something that has another name.

Each function gets the value and returns the arguments that stand for it here: none if it asks for
what trainkit does. One that would be wrong raises ConfigError, with what to do.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from trainkit.arguments import show
from trainkit.engine.select import auto_engine
from trainkit.errors import ConfigError
from trainkit.launch.environment import read_launcher

Taken = Callable[[Any], dict[str, Any]]


def nothing(value: Any) -> dict[str, Any]:
    """Take any value: it changes nothing that trainkit has."""
    return {}


def only(*legal: Any, key: str, otherwise: str) -> Taken:
    """Return a function that takes these values, and explains what to do for others."""

    def take(value: Any) -> dict[str, Any]:
        if value not in legal:
            raise ConfigError(f"{key} is {show(value)}, and {otherwise}")
        return {}

    return take


def _started(count: int) -> str:
    script = os.path.basename(sys.argv[0]) or "train.py"
    return (
        f"`horovodrun -np {count} python {script}` or `torchrun --nproc-per-node {count} {script}`"
    )


_NOTEBOOK = (
    "A notebook is one process, so it trains on one rank: for more, write the code to a file"
    " (%%writefile train.py) and start it from a cell (!horovodrun -np 2 python train.py)."
)


def _devices(value: Any) -> dict[str, Any]:
    if value in ("auto", None, -1, "-1"):
        return {}
    text = str(value)
    if isinstance(value, (list, tuple)) or "," in text:
        raise ConfigError(
            f"trainer.devices is {show(value)}. The launcher decides how many processes there are,"
            " and CUDA_VISIBLE_DEVICES which GPUs they use: leave it out."
        )
    launcher = read_launcher()
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f'trainer.devices is {show(value)}; it must be "auto", or the number of processes of'
            " each host."
        )
    if int(text) != launcher.local_size:
        raise ConfigError(
            f"trainer.devices is {text}, but {launcher.local_size}"
            f" process{'es' * (launcher.local_size > 1)} of this script"
            f" {'run' if launcher.local_size > 1 else 'runs'} on this host. The launcher starts a"
            f" process for each device: {_started(int(text))}. Or leave devices"
            f" out.{f' {_NOTEBOOK}' * ('ipykernel' in sys.modules)}"
        )
    return {}


def _num_nodes(value: Any) -> dict[str, Any]:
    launcher = read_launcher()
    hosts = max(1, launcher.world_size // max(1, launcher.local_size))
    if value not in (None, hosts, str(hosts)):
        raise ConfigError(
            f"trainer.num_nodes is {show(value)}, but the launcher started processes on {hosts}"
            f" host{'s' * (hosts > 1)}. Name the hosts to it (horovodrun -np 16 -H host1:8,host2:8"
            " ...), and leave num_nodes out."
        )
    return {}


def _accelerator(value: Any) -> dict[str, Any]:
    if value in ("auto", None):
        return {}
    if value in ("xpu", "mps"):
        return {"engine": auto_engine(device=value)}
    has_gpu = torch.cuda.is_available()
    if value in ("gpu", "cuda") and not has_gpu:
        raise ConfigError(
            f'trainer.accelerator is "{value}", but torch sees no GPU here. Leave it out, or use'
            ' "auto".'
        )
    if value not in ("gpu", "cuda", "cpu"):
        raise ConfigError(
            f'trainer.accelerator is {show(value)}; trainkit runs on "cpu" and "gpu", and takes'
            ' "auto".'
        )
    if value == "cpu" and has_gpu:
        return {"engine": auto_engine(device="cpu")}
    return {}


def _default_root_dir(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    now = os.path.join(os.path.expanduser(value), time.strftime("%Y-%m-%d_%H-%M-%S"))
    names = itertools.chain([now], (f"{now}.{number}" for number in itertools.count(2)))
    return {"run_dir": next(name for name in names if not os.path.exists(name))}


_of_the_launcher = only(
    *("auto", None, "horovod", "ddp"),
    *("ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"),
    key="trainer.strategy",
    otherwise=(
        "gradients are summed over all processes of the launcher:"
        f" engine=auto|single|horovod|ddp|fsdp|deepspeed. {_NOTEBOOK}"
    ),
)


def _strategy(value: Any) -> dict[str, Any]:
    return {"engine": "fsdp"} if value == "fsdp" else _of_the_launcher(value)


TRAINER_TAKES: dict[str, Taken] = {
    "accelerator": _accelerator,
    "devices": _devices,
    "num_nodes": _num_nodes,
    "strategy": _strategy,
    "default_root_dir": _default_root_dir,
    "use_distributed_sampler": only(
        *(True, None),
        key="trainer.use_distributed_sampler",
        otherwise=(
            "data are split over ranks. If each rank reads a part of its own, pass"
            " trainkit.sharded(loader)."
        ),
    ),
    "inference_mode": nothing,
    "barebones": only(
        *(False, None),
        key="trainer.barebones",
        otherwise=(
            "trainkit has no such switch. The same: logger=False, enable_checkpointing=False,"
            " enable_progress_bar=False, enable_model_summary=False."
        ),
    ),
    "plugins": only(
        *(None, [], ()),
        key="trainer.plugins",
        otherwise="trainkit has none: precision, launchers and engines are settings.",
    ),
    "enable_autolog_hparams": only(
        *(True, None),
        key="trainer.enable_autolog_hparams",
        otherwise="hyperparameters are logged by the loggers: leave it out.",
    ),
    "model_registry": only(
        None,
        key="trainer.model_registry",
        otherwise="trainkit has none: a logger's log_model uploads.",
    ),
}


def unset(logger: str, **otherwise: str) -> dict[str, Taken]:
    """Return what a logger takes of settings that are Lightning's alone: their defaults; others are
    explained.

    Args:
        logger: the class's name.
        otherwise: setting -> what to do in its place.
    """
    prefix = "give names a prefix where they are logged, as log('mine/loss', ...)."
    legal = {"prefix": ("", None)} | dict.fromkeys(otherwise, (None,))
    texts = {"prefix": prefix} | otherwise
    return {
        name: only(
            *values, key=f"{logger}.{name}", otherwise=f"there is no such setting: {texts[name]}"
        )
        for name, values in legal.items()
    }
