"""fit with a launcher of the config's. launcher=ray: this process becomes the driver, and the ranks run the same command.
launcher=slurm, launcher=kubernetes: this process submits a job and ends; its ranks run the same command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.launchers import launcher_of
from trainkit.errors import ConfigError
from trainkit.launch.kubernetes.launcher import KubernetesLauncher
from trainkit.launch.overrides import ELASTIC, override
from trainkit.launch.slurm.launcher import SlurmLauncher
from trainkit.launch.slurm.script import Fit
from trainkit.safety.masking import masked_arguments


def launch(job: Any, arguments: Sequence[str]) -> int:
    """Run a job's command on the ranks of its launcher, or submit it; return the exit code.

    Raises:
        ConfigError: a setting of the launcher is not legal.
    """
    given = {key: value for key, value in job.config["launcher"].items() if key != "_target_"}
    words = [word for word in arguments if not word.startswith("run_dir=")]
    return {"kubernetes": _create, "ray": _drive_ray, "slurm": _submit}[launcher_of(job.config)](job, words, given)


def _drive_ray(job: Any, words: list[str], given: Mapping[str, Any]) -> int:
    launcher = importlib.import_module("trainkit.launch.ray.launcher").RayLauncher(**given)
    words = [*words, override("run_dir", job.config["run_dir"])]
    if not has_elastic(job.config):
        print("[elastic] callbacks.elastic is added, with its defaults: ranks that are lost are replaced", file=sys.stderr)
        words.append(ELASTIC)
    run_dir = None if keeps_checkpoints_elsewhere(job.config) else job.config["run_dir"]
    code: int = launcher.run(["python", "-m", "trainkit", job.command, *words], run_dir)
    return code


def _submit(job: Any, words: Sequence[str], given: Mapping[str, Any]) -> int:
    config, run_dir = job.config, Path(job.config["run_dir"]).absolute()
    start = resume = ["resume=auto"]
    if config.get("ckpt_path") is not None:  # for the first start: later ones resume from the run's own
        start, resume = [override("ckpt_path", config["ckpt_path"])], ["ckpt_path=null", "resume=auto"]
    words = [word for word in words if not word.startswith(("ckpt_path=", "resume=", "launcher=", "launcher."))]
    fit = Fit(
        given.get("job_name") or str(config["conf"]),
        [job.command, *words, override("run_dir", str(run_dir))],
        start=start,
        resume=resume,
        run_dir=run_dir,
        folder=Path.cwd(),
        needs_secret=str(config["engine"].get("_target_")).endswith("HorovodEngine"),
    )
    SlurmLauncher(**given).run(fit, private=masked_arguments(words) != list(words))
    return 0


def _create(job: Any, words: Sequence[str], given: Mapping[str, Any]) -> int:
    if job.config.get("ckpt_path") is not None:
        raise ConfigError(
            f"ckpt_path is '{job.config['ckpt_path']}', and each start of a job of launcher=kubernetes resumes from its own "
            "run's last checkpoint. To begin with the weights of another run use init_weights=PATH; to resume one give its "
            "run_dir."
        )
    run_dir = str(job.config["run_dir"])
    words = [word for word in words if not word.startswith(("resume=", "launcher=", "launcher."))]
    words = [job.command, *words, override("run_dir", run_dir), "resume=auto"]
    kept_here = None if keeps_checkpoints_elsewhere(job.config) else run_dir
    KubernetesLauncher(**given).run(str(job.config["conf"]), words, kept_here)
    return 0


def has_elastic(config: Mapping[str, Any]) -> bool:
    """Return whether a config has the callback Elastic."""
    return any(str(node.get("_target_")).endswith(".Elastic") for node in _callbacks(config))


def keeps_checkpoints_elsewhere(config: Mapping[str, Any]) -> bool:
    """Return whether checkpoints go to a store by URL, so that the nodes need not share the run's folder."""
    return any("://" in str(node.get("dirpath")) for node in _callbacks(config))


def _callbacks(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in (config.get("callbacks") or {}).values() if node]
