"""The launcher of a config: whether this process starts ranks with it, and which jobs it cannot start."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from trainkit.errors import ConfigError
from trainkit.launch.environment import is_rank_of_ray, read_launcher
from trainkit.launch.slurm.step import is_rank_of_slurm

_ENGINES = {"DDPEngine": "ddp", "FSDPEngine": "fsdp", "SingleEngine": "single", "DeepSpeedEngine": "deepspeed"}


def starts_ranks(config: Mapping[str, Any]) -> bool:
    """Return whether this process is to start the ranks of a job, with the config's launcher."""
    return bool(config.get("launcher")) and read_launcher().name == "none" and not is_rank_of_slurm()


def launcher_of(config: Mapping[str, Any]) -> str:
    """Return the name of a config's launcher: "ray", "slurm", or "" for none."""
    target = str((config.get("launcher") or {}).get("_target_", ""))
    return {"RayLauncher": "ray", "SlurmLauncher": "slurm"}.get(target.rpartition(".")[2], "")


def engine_started_by(config: Mapping[str, Any]) -> str:
    """Return the engine that engine=auto has on the ranks of a config's launcher."""
    if launcher_of(config) != "slurm":
        return "horovod"
    given = config["launcher"]
    tasks = [given.get(key) or 1 for key in ("nodes", "ntasks_per_node", "gpus_per_node")]
    return "single" if tasks == [1, 1, 1] else "ddp"


def check_launcher(config: dict[str, Any], command: str) -> None:
    """Refuse a launcher that cannot start this command; a rank that it started takes no notice of it.

    Raises:
        ConfigError: it cannot.
    """
    if not config.get("launcher") or is_rank_of_ray() or is_rank_of_slurm():
        return
    name, own = read_launcher().name, launcher_of(config)
    if name != "none":
        raise ConfigError(
            f"launcher is {own}, and this process was started by {name}: two launchers. Start it without {name}, or without "
            f"launcher={own}."
        )
    if command != "fit":
        raise ConfigError(f"launcher is {own}, which is for fit; {command} runs in this process. Leave it out: launcher=none.")
    engine = _ENGINES.get(str((config.get("engine") or {}).get("_target_", "")).rpartition(".")[2])
    if own == "slurm":
        _check_slurm(config, engine)
        return
    if engine is not None:
        raise ConfigError(
            f"engine is {engine}, and launcher=ray starts ranks of Horovod. Use engine=auto or engine=horovod; for engine=ddp "
            "and engine=fsdp use Ray Train's TorchTrainer, with a Trainer(engine='ddp') in its function."
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launcher is ray, and ray is not installed. Install it: pip install 'trainkit[ray]'")


def _check_slurm(config: Mapping[str, Any], engine: str | None) -> None:
    if engine == "single" and engine_started_by(config) != "single":
        raise ConfigError(
            "engine is single, and launcher=slurm asks for several ranks: each would train alone. Use engine=auto (which is "
            "ddp there) or engine=horovod, or one rank: launcher.nodes=1 launcher.ntasks_per_node=1."
        )
    if any(str(node.get("_target_")).endswith(".Elastic") for node in (config.get("callbacks") or {}).values() if node):
        raise ConfigError(
            "callbacks.elastic is set, and launcher is slurm, whose jobs keep their ranks: it has no effect there. Leave it "
            "out; a job that loses a node is queued again, and resumes."
        )
    if config["launcher"].get("requeue", True) and config["trainer"].get("enable_checkpointing") is False:
        raise ConfigError(
            "trainer.enable_checkpointing is false, and launcher.requeue is true: each start of the job would begin from the "
            "first step. Save checkpoints, or set launcher.requeue=false."
        )
