"""KubernetesLauncher: creates the objects of a fit with kubectl, or prints their manifest."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.errors import ConfigError
from trainkit.extensions.jobs.fits import engine_of_ranks, stores_elsewhere
from trainkit.extensions.jobs.overrides import override, without
from trainkit.extensions.kubernetes import schemas
from trainkit.extensions.kubernetes.creation import create, end_with_job
from trainkit.extensions.kubernetes.manifest import manifest_of, objects_of
from trainkit.extensions.kubernetes.options import name_of, options_of
from trainkit.launch.job_launcher import FitConfig, JobLauncher
from trainkit.safety.masking import is_secret, masked_arguments

# of manifests, where the command was typed: the run's own folder is in the cluster
FOLDER = "kubernetes"
_OF_HOROVOD = ("MPIJob", "RayJob")  # kinds


class KubernetesLauncher(JobLauncher):
    """A fit in the pods of a cluster; see docs/kubernetes.md.

    Args:
        image: that holds trainkit.
        kind: of the object: Job, JobSet, TrainJob (torchrun in each pod), MPIJob (horovodrun),
            RayJob (launcher=ray inside).
        runtime: of a TrainJob: a ClusterTrainingRuntime; null: torch-distributed.
        nodes: number of pods that train; of a RayJob also a range, [2, 8].
        gpus_per_node: GPUs of each.
        nproc_per_node: ranks of each; null: gpus_per_node, or 1.
        cpu, memory: of each pod, as 8 and 64Gi.
        gpu_resource: the cluster's name for a GPU.
        head_resources: of a RayJob's head and an MPIJob's launcher, which train nothing: {cpu: 4,
            memory: 16Gi}.
        volumes: claims and where they are mounted: {runs: /runs}; other kinds as Kubernetes writes
            them, with mountPath.
        env: variables of the ranks.
        env_from_secrets: names of Secrets; their entries are variables of the ranks.
        node_selector, tolerations, service_account, priority_class, image_pull_secrets: of the
        pods.
        pod_spec: further fields of the pods' spec.
        security_context: of each container: "restricted" for what namespaces of that name require,
            or a mapping.
        labels, annotations: of all objects and pods.
        namespace: null: that of kubectl's context.
        job_name: null: the config's name.
        shm_size: of /dev/shm, as 16Gi: loader workers use it.
        max_failures: so often the job may lose a pod, or fail, and start again; null: 10.
        grace_s: seconds between a pod's SIGTERM and its end; the ranks save a checkpoint in them,
            but for those of an MPIJob.
        ttl_s: seconds until an ended job is removed; null: it stays.
        dry_run: print the manifest, compared with Kubernetes' schemas if kubernetes-validate is
            there; create nothing.

    Raises:
        ConfigError: a setting is not legal.
    """

    name = "kubernetes"
    several = "creates one. Create them one by one."
    runs_elsewhere = True  # the run's folder is one of the pods

    def __init__(
        self,
        *,
        image: str | None = None,
        kind: str = "Job",
        runtime: str | None = None,
        nodes: int | list[int] = 1,
        gpus_per_node: int | None = None,
        nproc_per_node: int | None = None,
        cpu: int | float | str | None = None,
        memory: str | None = None,
        gpu_resource: str = "nvidia.com/gpu",
        head_resources: dict[str, Any] | None = None,
        volumes: dict[str, Any] | None = None,
        env: dict[str, Any] | None = None,
        env_from_secrets: list[str] | None = None,
        node_selector: dict[str, str] | None = None,
        tolerations: list[dict[str, Any]] | None = None,
        service_account: str | None = None,
        priority_class: str | None = None,
        image_pull_secrets: list[str] | None = None,
        pod_spec: dict[str, Any] | None = None,
        security_context: str | dict[str, Any] | None = None,
        labels: dict[str, Any] | None = None,
        annotations: dict[str, Any] | None = None,
        namespace: str | None = None,
        job_name: str | None = None,
        shm_size: str | None = None,
        max_failures: int | None = None,
        grace_s: int = 120,
        ttl_s: int | None = None,
        dry_run: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.options = options_of(given)
        self.job_name = job_name
        self.dry_run = dry_run

    @classmethod
    def engine_of(cls, settings: Mapping[str, Any]) -> str:
        """Return the engine that engine=auto has in the pods."""
        if settings.get("kind") in _OF_HOROVOD:
            return "horovod"
        return engine_of_ranks(
            *(settings.get(name) for name in ("nodes", "nproc_per_node", "gpus_per_node"))
        )

    @classmethod
    def keeps_ranks(cls, settings: Mapping[str, Any]) -> bool:
        """Return whether it has no driver of Ray's, which replaces ranks."""
        return settings.get("kind") != "RayJob"

    @classmethod
    def restarts(cls, settings: Mapping[str, Any]) -> bool:
        """Return True: a pod that is lost is made again."""
        return True

    @classmethod
    def refuses(cls, fit: FitConfig) -> str | None:
        """Return why it cannot start a fit, and what to do; None if it can."""
        kind = fit.settings.get("kind")
        if kind in _OF_HOROVOD and fit.engine not in ("auto", "horovod", ""):
            return (
                f"engine is {fit.engine}, and launcher.kind={kind} starts ranks of Horovod. Use"
                " engine=auto or engine=horovod, or launcher.kind=Job, which starts torchrun."
            )
        if kind not in _OF_HOROVOD and fit.engine == "horovod":
            return (
                f"engine is horovod, and launcher.kind={kind} starts torchrun. Use engine=auto"
                " (which is ddp there), or launcher.kind=MPIJob, which starts horovodrun."
            )
        return super().refuses(fit)

    def launch(self, fit: FitConfig, arguments: Sequence[str]) -> int:
        """Create a job that runs the command; see `run`."""
        ckpt_path = fit.config.get("ckpt_path")
        if ckpt_path is not None and not fit.config.get("resume"):
            raise ConfigError(
                f"ckpt_path is '{ckpt_path}', and each start of a job of launcher=kubernetes"
                " resumes from its own run's last checkpoint. To begin at this one, while there is"
                " none of the run's own, give resume=auto beside it; to begin with its weights"
                " alone use init_weights=PATH; to resume its run give its run_dir."
            )
        own = without(arguments, "resume", "launcher")
        arguments = [*own, override("run_dir", fit.run_dir), "resume=auto"]
        self.run(str(fit.config["conf"]), arguments, None if stores_elsewhere(fit) else fit.run_dir)
        return 0

    def run(self, config_name: str, arguments: Sequence[str], run_dir: str | None) -> Path | None:
        """Create the objects of a fit, and return the file of its manifest; or print the manifest,
        and return None.

        Args:
            config_name: names the job, if job_name does not.
            arguments: of the command, after "python -m trainkit".
            run_dir: the run's folder in the pods; None if its checkpoints go elsewhere.

        Raises:
            ConfigError: the run's folder is on no volume, kubectl is not installed, or the cluster
                does not take the job. Nothing is left in the cluster.
        """
        name = name_of(self.job_name or config_name, self.job_name is not None)
        if run_dir is not None:
            self._check_folder(run_dir)
        text = manifest_of(name, arguments, self.options)
        if self.dry_run:
            why = schemas.check(objects_of(name, arguments, self.options))
            print(text, end="")
            if why is not None:
                print(f"[kubernetes] {why}", file=sys.stderr)
            return None
        file = Path(FOLDER) / f"{name}.yaml"
        private = masked_arguments(arguments) != list(arguments) or any(
            map(is_secret, self.options.env)
        )
        create(text, file, self.options.where, private=private)
        if self.options.kind == "Job" and self.options.nodes > 1 and self.options.ttl_s is not None:
            end_with_job(name, self.options.where)
        self._say(name, file)
        return file

    def _check_folder(self, run_dir: str) -> None:
        paths = [volume.path for volume in self.options.volumes if volume.holds_runs]
        folder = PurePosixPath(run_dir)
        if not any(folder.is_relative_to(path) for path in paths):
            mounted = (
                f"there: {', '.join(paths)}"
                if paths
                else "of a claim: launcher.volumes={runs: /runs}"
            )
            raise ConfigError(
                f"run_dir is '{run_dir}', which is on no volume that outlives its pods: its"
                f" checkpoints would end with them. Give a folder on one {mounted}, as"
                " run_dir=/runs/mine, or keep checkpoints in a store:"
                " callbacks.checkpoint.dirpath=s3://..."
            )

    def _say(self, name: str, file: Path) -> None:
        options = self.options
        print(
            f"[kubernetes] {options.kind} {name} is created: {options.nodes} x {options.ranks}"
            f" ranks; manifest: {file}"
        )
        command = "python -m trainkit jobs"
        print(f"[kubernetes] state: {command}; output: {command} logs {name}")
        print(
            f"[kubernetes] to end it: {command} cancel {name}; each start resumes from the last"
            " checkpoint",
            flush=True,
        )
