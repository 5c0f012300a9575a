"""fit with a launcher of the config's (launcher=ray): this process becomes the driver, and the ranks run the same command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import ConfigError
from trainkit.tuning.words import ELASTIC, override


def launch(job: Any, arguments: Sequence[str]) -> int:
    """Run a job's command on the ranks of its launcher; return the exit code.

    Raises:
        ConfigError: several jobs (-m), or a setting of the launcher is not legal.
    """
    if any(word in ("-m", "--multirun") for word in arguments):
        raise ConfigError(
            "-m runs several jobs in this process, and launcher=ray starts one on a cluster. Start them one by one, or search "
            "with Ray Tune."
        )
    given = {name: value for name, value in job.config["launcher"].items() if name != "_target_"}
    launcher = importlib.import_module("trainkit.launch.ray.launcher").RayLauncher(**given)
    words = [*(word for word in arguments if not word.startswith("run_dir=")), override("run_dir", job.config["run_dir"])]
    if not has_elastic(job.config):
        print("[elastic] callbacks.elastic is added, with its defaults: ranks that are lost are replaced", file=sys.stderr)
        words.append(ELASTIC)
    run_dir = None if keeps_checkpoints_elsewhere(job.config) else job.config["run_dir"]
    code: int = launcher.run(["python", "-m", "trainkit", job.command, *words], run_dir)
    return code


def has_elastic(config: Mapping[str, Any]) -> bool:
    """Return whether a config has the callback Elastic."""
    return any(str(node.get("_target_")).endswith(".Elastic") for node in _callbacks(config))


def keeps_checkpoints_elsewhere(config: Mapping[str, Any]) -> bool:
    """Return whether checkpoints go to a store by URL, so that the nodes need not share the run's folder."""
    return any("://" in str(node.get("dirpath")) for node in _callbacks(config))


def _callbacks(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in (config.get("callbacks") or {}).values() if node]
