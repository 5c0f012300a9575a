"""RayLauncher: a fit on the ranks of a Ray cluster (job.py). Ray is imported when it runs: a config is checked without it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from trainkit.launch.ray.options import options_of, refuse_shared_gpus


class RayLauncher:
    """Ranks of a Ray cluster: the one that RAY_ADDRESS names, as inside `ray job submit`, or one started on this machine.

    Lost workers are replaced in their slots, and the living ones continue from memory; see docs/ray.md.

    Args:
        num_workers: ranks; of two numbers, [least, most], the job begins with the first, grows up to the second as resources
            come, and continues with fewer, down to the first, as nodes go.
        resources_per_worker: Ray's resources of a rank, as {CPU: 2, GPU: 1}; memory in bytes.
        placement_strategy: of the first ranks' bundles.
        workers_per_bundle: ranks that share a bundle, and so a host: with STRICT_SPREAD so many on each host.
        max_failures: so often ranks may be lost by crashes; null: any number. 0: the first loss ends the job, as under
            horovodrun -np.
        start_timeout_s: the job ends after fewer ranks than needed were available for so long.
        runtime_env: Ray's environment of the workers: pip, env_vars, working_dir.

    Raises:
        ConfigError: a setting is not legal.
    """

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

    def run(self, command: Sequence[str], run_dir: str | None = None) -> int:
        """Run a command on all ranks; return the job's exit code: 0, that of the first error, or 75 with a checkpoint.

        Args:
            command: a first word "python" is the Python of the worker's node.
            run_dir: a folder that all nodes must share, as the command knows it; None: not checked.

        Raises:
            ConfigError: there is no such cluster, its resources do not come, or its nodes lack what workers need.
            EngineError: the command calls hvd.init() itself.
        """
        refuse_shared_gpus("launcher.", self.options)
        # Before Ray is connected: raylets of one machine share a submitted job's folder, and may remove it.
        folder = os.getcwd()
        job = importlib.import_module("trainkit.launch.ray.job")  # ray
        cluster = importlib.import_module("trainkit.launch.ray.cluster")
        with cluster.connected(self.options):
            code: int
            code, _ = job.run_job(self.options, command, folder, run_dir)
        return code
