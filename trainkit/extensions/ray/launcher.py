"""RayLauncher: a fit on the ranks of a Ray cluster (job.py).
Ray is imported when it runs: a config is checked without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.extensions.jobs.fits import stores_elsewhere
from trainkit.extensions.jobs.overrides import override
from trainkit.extensions.ray.options import ELASTIC, options_of, refuse_shared_gpus, stop_seconds
from trainkit.extensions.ray.tuning.link import is_trial
from trainkit.launch.job_launcher import FitConfig, JobLauncher

_OF_TORCH = ("ddp", "fsdp")  # engines whose ranks meet through the driver, without Horovod


class RayLauncher(JobLauncher):
    """Ranks of a Ray cluster: the one that RAY_ADDRESS names, as inside `ray job submit`, or one
    started on this machine.

    Lost workers are replaced in their slots, and the living ones continue from memory; see
    docs/ray.md.

    Args:
        num_workers: ranks; of two numbers, [least, most], the job begins with the first, grows up
            to the second as resources come, and continues with fewer, down to the first, as nodes
            go.
        resources_per_worker: Ray's resources of a rank, as {CPU: 2, GPU: 1}; memory in bytes.
        placement_strategy: of the first ranks' bundles.
        workers_per_bundle: ranks that share a bundle, and so a host: with STRICT_SPREAD so many on
            each host.
        max_failures: so often ranks may be lost by crashes; null: any number. 0: the first loss
            ends the job, as under horovodrun -np.
        start_timeout_s: the job ends after fewer ranks than needed were available for so long.
        runtime_env: Ray's environment of the workers: pip, env_vars, working_dir.

    Raises:
        ConfigError: a setting is not legal.
    """

    name = "ray"
    several = "starts one on a cluster. Start them one by one, or search with Ray Tune."

    def __init__(
        self,
        *,
        num_workers: int | list[int] = 2,
        resources_per_worker: dict[str, float] | None = None,
        placement_strategy: str = "PACK",
        workers_per_bundle: int = 1,
        max_failures: int | None = None,
        start_timeout_s: float = 600.0,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self.options = options_of(
            "launcher.",
            num_workers,
            resources_per_worker,
            placement_strategy,
            workers_per_bundle=workers_per_bundle,
            max_failures=max_failures,
            start_timeout_s=start_timeout_s,
            runtime_env=runtime_env,
        )

    @classmethod
    def engine_of(cls, settings: Mapping[str, Any]) -> str:
        """Return horovod: its elastic driver starts the ranks."""
        return "horovod"

    @classmethod
    def keeps_ranks(cls, settings: Mapping[str, Any]) -> bool:
        """Return False: ranks that are lost are replaced."""
        return False

    @classmethod
    def refuses(cls, fit: FitConfig) -> str | None:
        """Return why it cannot start a fit, and what to do; None if it can."""
        if fit.engine not in ("auto", "horovod", *_OF_TORCH, ""):
            return (
                f"engine is {fit.engine}, which launcher=ray does not start. Use engine=horovod"
                " (engine=auto), engine=ddp, or engine=fsdp with engine.replicas=2 or more; for"
                " another engine use Ray Train's TorchTrainer, with a Trainer in its function."
            )
        if importlib.util.find_spec("ray") is None:
            return (
                "launcher is ray, and ray is not installed. Install it: pip install 'trainkit[ray]'"
            )
        if is_trial():
            return (
                "launcher is ray, in a trial of a search: its ranks would wait for what the trials"
                " hold. Leave it out (launcher=none), and give search.num_workers=N, or"
                " trial(num_workers=N) in a Tuner of your own."
            )
        return super().refuses(fit)

    def launch(self, fit: FitConfig, arguments: Sequence[str]) -> int:
        """Run the command on all ranks, with Elastic; see `run`."""
        arguments = [*arguments, override("run_dir", fit.run_dir)]
        if "elastic" not in fit.roles:
            print(
                "[elastic] callbacks.elastic is added, with its defaults: ranks that are lost are"
                " replaced",
                file=sys.stderr,
            )
            arguments.append(ELASTIC)
        return self.run(
            ["python", "-m", "trainkit", *arguments],
            None if stores_elsewhere(fit) else fit.run_dir,
            needs_horovod=fit.engine not in _OF_TORCH,
        )

    def run(
        self, command: Sequence[str], run_dir: str | None = None, *, needs_horovod: bool = True
    ) -> int:
        """Run a command on all ranks; return the job's exit code: 0, that of the first error, or 75
        with a checkpoint.

        Args:
            command: a first word "python" is the Python of the worker's node.
            run_dir: a folder that all nodes must share, as the command knows it; None: not checked.
            needs_horovod: whether each node must have trainkit's Horovod; engine=ddp does without.

        Raises:
            ConfigError: there is no such cluster, its resources do not come, or its nodes lack what
                workers need.
            EngineError: the command calls hvd.init() itself.
        """
        refuse_shared_gpus("launcher.", self.options)
        asked = dataclasses.replace(self.options, stop_s=stop_seconds(os.environ))
        # Before Ray is connected: raylets of one machine share a submitted job's folder, and may
        # remove it.
        folder = os.getcwd()
        job = importlib.import_module("trainkit.extensions.ray.job")  # ray
        cluster = importlib.import_module("trainkit.extensions.ray.cluster")
        with cluster.connected(asked) as options:
            code: int
            code, _ = job.run_job(options, command, folder, run_dir, needs_horovod=needs_horovod)
        return code
