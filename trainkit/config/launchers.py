"""The launcher of a config: whether this process starts ranks with it, and which jobs it cannot start."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from trainkit.errors import ConfigError
from trainkit.launch.environment import is_rank_of_ray, read_launcher


def starts_ranks(config: Mapping[str, Any]) -> bool:
    """Return whether this process is to start the ranks of a job, with the config's launcher."""
    return bool(config.get("launcher")) and read_launcher().name == "none"


def check_launcher(config: dict[str, Any], command: str) -> None:
    """Refuse a launcher that cannot start this command; a rank that it started takes no notice of it.

    Raises:
        ConfigError: it cannot.
    """
    if not config.get("launcher") or is_rank_of_ray():
        return
    name = read_launcher().name
    if name != "none":
        raise ConfigError(
            f"launcher is ray, and this process was started by {name}: two launchers. Start it without {name}, or without "
            "launcher=ray."
        )
    if command != "fit":
        raise ConfigError(f"launcher is ray, which is for fit; {command} runs in this process. Leave it out: launcher=none.")
    engine = str((config.get("engine") or {}).get("_target_", "")).rpartition(".")[2]
    typed = {"DDPEngine": "ddp", "FSDPEngine": "fsdp", "SingleEngine": "single", "DeepSpeedEngine": "deepspeed"}.get(engine)
    if typed is not None:
        raise ConfigError(
            f"engine is {typed}, and launcher=ray starts ranks of Horovod. Use engine=auto or engine=horovod; for engine=ddp "
            "and engine=fsdp use Ray Train's TorchTrainer, with a Trainer(engine='ddp') in its function."
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launcher is ray, and ray is not installed. Install it: pip install 'trainkit[ray]'")
