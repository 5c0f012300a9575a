"""The launcher of a config: whether this process starts ranks with it, and which jobs it cannot start."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from trainkit.errors import ConfigError
from trainkit.launch.environment import is_rank_of_ray, read_launcher
from trainkit.launch.slurm.step import is_rank_of_slurm

_OF_HOROVOD = ("MPIJob", "RayJob")  # kinds of launcher=kubernetes
_ENGINES = {"DDPEngine": "ddp", "FSDPEngine": "fsdp", "SingleEngine": "single", "DeepSpeedEngine": "deepspeed"}

_SEVERAL = {
    "kubernetes": "-m runs several jobs in this process, and launcher=kubernetes creates one. Create them one by one.",
    "ray": "-m runs several jobs in this process, and launcher=ray starts one on a cluster. Start them one by one, or search "
    "with Ray Tune.",
    "slurm": "-m runs several jobs in this process, and launcher=slurm submits one. Submit them one by one, or sweep with "
    "-m hydra/launcher=submitit_slurm, a process for each job.",
}


def starts_ranks(config: Mapping[str, Any]) -> bool:
    """Return whether this process is to start the ranks of a job, with the config's launcher."""
    return bool(config.get("launcher")) and read_launcher().name == "none" and not is_rank_of_slurm()


def launcher_of(config: Mapping[str, Any]) -> str:
    """Return the name of a config's launcher: "kubernetes", "ray", "slurm", or "" for none."""
    target = str((config.get("launcher") or {}).get("_target_", ""))
    own = {"KubernetesLauncher": "kubernetes", "RayLauncher": "ray", "SlurmLauncher": "slurm"}
    return own.get(target.rpartition(".")[2], "")


def engine_started_by(config: Mapping[str, Any]) -> str:
    """Return the engine that engine=auto has on the ranks of a config's launcher."""
    given = config["launcher"]
    if launcher_of(config) == "ray" or given.get("kind") in _OF_HOROVOD:
        return "horovod"
    ranks = [given.get(key) or 1 for key in ("nodes", "ntasks_per_node", "nproc_per_node", "gpus_per_node")]
    return "single" if ranks == [1, 1, 1, 1] else "ddp"


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
    if own != "ray":
        _check_batch_job(config, engine, own)
        return
    if engine is not None:
        raise ConfigError(
            f"engine is {engine}, and launcher=ray starts ranks of Horovod. Use engine=auto or engine=horovod; for engine=ddp "
            "and engine=fsdp use Ray Train's TorchTrainer, with a Trainer(engine='ddp') in its function."
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launcher is ray, and ray is not installed. Install it: pip install 'trainkit[ray]'")


def refuse_several(config: Mapping[str, Any]) -> None:
    """Refuse a job of several (-m) that this process would start with the config's launcher.

    Raises:
        ConfigError: it is one.
    """
    if starts_ranks(config):
        raise ConfigError(_SEVERAL[launcher_of(config)])


def _check_batch_job(config: Mapping[str, Any], engine: str | None, own: str) -> None:
    """Refuse what a job that is submitted, and may start several times, cannot run."""
    given, started = config["launcher"], engine_started_by(config)
    if engine == "single" and started != "single":
        raise ConfigError(
            f"engine is single, and launcher={own} asks for several ranks: each would train alone. Use engine=auto (which is "
            f"{started} there), or one rank: launcher.nodes=1."
        )
    kind = given.get("kind")
    if kind in _OF_HOROVOD and engine is not None:
        raise ConfigError(
            f"engine is {engine}, and launcher.kind={kind} starts ranks of Horovod. Use engine=auto or engine=horovod, or "
            "launcher.kind=Job, which starts torchrun."
        )
    if own == "kubernetes" and kind not in _OF_HOROVOD and str(config["engine"].get("_target_")).endswith("HorovodEngine"):
        raise ConfigError(
            f"engine is horovod, and launcher.kind={kind} starts torchrun. Use engine=auto (which is ddp there), or "
            "launcher.kind=MPIJob, which starts horovodrun."
        )
    if kind != "RayJob" and any(str(node.get("_target_")).endswith(".Elastic") for node in _callbacks(config)):
        again = "is queued again" if own == "slurm" else "starts again"
        raise ConfigError(
            f"callbacks.elastic is set, and launcher is {own}: its jobs keep their ranks, so it has no effect there. Leave it "
            f"out; a job that loses a node {again}, and resumes."
        )
    if given.get("requeue", True) and config["trainer"].get("enable_checkpointing") is False:
        cure = "set launcher.requeue=false" if own == "slurm" else "leave launcher=kubernetes out"
        raise ConfigError(
            f"trainer.enable_checkpointing is false, and a job of launcher={own} may start several times: each start would "
            f"begin from the first step. Save checkpoints, or {cure}."
        )


def _callbacks(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in (config.get("callbacks") or {}).values() if node]
