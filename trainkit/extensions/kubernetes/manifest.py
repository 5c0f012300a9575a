"""The objects of a job on Kubernetes, as a manifest of YAML documents.

Job, JobSet   pods of an Indexed Job, each with torchrun, which meet at pod 0 through a headless Service. A pod that is lost
              is made again by its index. Without it the others end too: all start again together,
              and resume from the last checkpoint.
TrainJob      of Kubeflow Trainer: torchrun in each pod of a runtime that the cluster has.
MPIJob        of the MPI operator: its launcher runs horovodrun over ssh, on workers that it lists in a hostfile.
RayJob        of KubeRay: launcher=ray inside, elastic.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainkit.extensions.kubernetes import train_job
from trainkit.extensions.kubernetes.options import NAME_LABEL, KubernetesOptions, amount_of

PORT = 29400  # of torchrun's rendezvous on pod 0
_LAUNCHER = "TRAINKIT_LAUNCHER"  # of ranks, which then take no notice of their config's launcher
# read by torchrun: seconds between the SIGTERM that it passes on, and its SIGKILL
_RANKS_STOP_WAIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TORCHRUN_S = 5  # of a pod's grace, for torchrun itself
# read by the head: seconds from a stopped job's SIGTERM to its SIGKILL
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_HOSTS = "/etc/mpi/hostfile"  # of the MPI operator


def manifest_of(name: str, arguments: Sequence[str], options: KubernetesOptions) -> str:
    """Return the manifest of a job.

    Args:
        name: of all objects.
        arguments: of the command, after "python -m trainkit".
        options: what the user set.
    """
    return str(yaml.safe_dump_all(objects_of(name, arguments, options), sort_keys=False, width=120))


def objects_of(
    name: str, arguments: Sequence[str], options: KubernetesOptions
) -> list[dict[str, Any]]:
    """Return the objects of that manifest."""
    makers = {
        "Job": _job,
        "JobSet": _job_set,
        "TrainJob": _train_job,
        "MPIJob": _mpi_job,
        "RayJob": _ray_job,
    }
    make = makers[options.kind]
    return make(name, list(arguments), options)


def _job(name: str, arguments: list[str], options: KubernetesOptions) -> list[dict[str, Any]]:
    objects = [
        _object(
            "batch/v1", "Job", name, _indexed(name, f"{name}-0.{name}", arguments, options), options
        )
    ]
    return objects if options.nodes == 1 else [_service(name, options), *objects]


def _job_set(name: str, arguments: list[str], options: KubernetesOptions) -> list[dict[str, Any]]:
    # JobSet's names: of the set, of the jobs, number of the job, of the pod
    first = f"{name}-ranks-0-0.{name}"
    spec = _indexed(name, first, arguments, options)
    spec["backoffLimit"] = 0  # the set starts all pods again, not one
    ttl = spec.pop("ttlSecondsAfterFinished", None)
    body: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": options.max_failures},
        "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": spec}}],
    }
    spec["template"]["spec"].pop("subdomain", None)
    body |= {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, body, options)]


def _train_job(name: str, arguments: list[str], options: KubernetesOptions) -> list[dict[str, Any]]:
    pod = _pod(name, ["torchrun", "-m", "trainkit", *arguments], options)
    spec = train_job.spec_of(pod, options.runtime, options.nodes, options.ranks)
    return [_object(train_job.VERSION, "TrainJob", name, spec, options)]


def _mpi_job(name: str, arguments: list[str], options: KubernetesOptions) -> list[dict[str, Any]]:
    ranks = options.nodes * options.ranks
    command = [
        "horovodrun",
        "-np",
        str(ranks),
        "--hostfile",
        _HOSTS,
        "python",
        "-m",
        "trainkit",
        *arguments,
    ]
    launcher = _without_training(_pod(name, command, options), options)
    worker = _pod(name, None, options)
    body = {
        "slotsPerWorker": options.ranks,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.max_failures},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": launcher},
            "Worker": {"replicas": options.nodes, "template": worker},
        },
    }
    if options.ttl_s is not None:
        body["runPolicy"] |= {"ttlSecondsAfterFinished": options.ttl_s}  # type: ignore[operator]
    return [_object("kubeflow.org/v2beta1", "MPIJob", name, body, options)]


def _ray_job(name: str, arguments: list[str], options: KubernetesOptions) -> list[dict[str, Any]]:
    each = _shares(options)
    counts = [str(count * options.ranks) for count in (options.nodes, options.max_nodes)]
    grows = options.max_nodes > options.nodes
    own = [
        (
            f"launcher.num_workers=[{','.join(counts)}]"
            if grows
            else f"launcher.num_workers={counts[0]}"
        )
    ]
    if each:
        shares = ", ".join(f"{key}: {amount:.10g}" for key, amount in each.items())
        own.append(f"launcher.resources_per_worker={{{shares}}}")
    # Ray kills the driver 3 s after SIGTERM, before the last checkpoint
    waits = {_STOP_WAIT: str(options.grace_s)}
    head = _without_training(_pod(name, None, options, waits), options)
    workers = {"groupName": "ranks", "replicas": options.nodes, "minReplicas": options.nodes}
    body: dict[str, Any] = {
        "entrypoint": shlex.join(["python", "-m", "trainkit", *arguments, "launcher=ray", *own]),
        "shutdownAfterJobFinishes": True,
        "backoffLimit": options.max_failures,
        "rayClusterSpec": {
            **({"enableInTreeAutoscaling": True} if grows else {}),
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
            "workerGroupSpecs": [
                {
                    **workers,
                    "maxReplicas": options.max_nodes,
                    "rayStartParams": {},
                    "template": _pod(name, None, options),
                }
            ],
        },
    }
    body |= {} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}
    return [_object("ray.io/v1", "RayJob", name, body, options)]


def _without_training(pod: dict[str, Any], options: KubernetesOptions) -> dict[str, Any]:
    """Give a pod that trains nothing the resources of the head, in place of the ranks'."""
    container = pod["spec"]["containers"][0]
    container.pop("resources", None)
    container |= {"resources": {"limits": dict(options.head)}} if options.head else {}
    return pod


def _shares(options: KubernetesOptions) -> dict[str, float]:
    """Return a rank's resources, in Ray's names; those of a pod's ranks are never more than its
    own: Ray counts CPUs to four digits, and only whole GPUs.
    """
    shares = {}
    for resource, amount in options.resources.items():
        if resource == "cpu":
            shares["CPU"] = math.floor(amount_of(amount) / options.ranks * 1e4) / 1e4
        elif resource != "memory":
            shares["GPU"] = float(int(amount) // options.ranks)
    return shares


def _indexed(
    name: str, first: str, arguments: list[str], options: KubernetesOptions
) -> dict[str, Any]:
    """Return the spec of an Indexed Job; `first` is the host name of its pod 0."""
    pod = _pod(name, _torchrun(first, arguments, options), options)
    if options.nodes > 1:
        pod["spec"]["subdomain"] = name
    spec: dict[str, Any] = {
        "completions": options.nodes,
        "parallelism": options.nodes,
        "completionMode": "Indexed",
        # All pods end with one that is lost, and each counts.
        "backoffLimit": options.max_failures * options.nodes,
        # A pod that is drained or preempted is no fault of the job.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
        "template": pod,
    }
    return spec if options.ttl_s is None else spec | {"ttlSecondsAfterFinished": options.ttl_s}


def _torchrun(first: str, arguments: list[str], options: KubernetesOptions) -> list[str]:
    own = ["-m", "trainkit", *arguments]
    if options.nodes * options.ranks == 1:
        return ["python", *own]
    if options.nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={options.ranks}", *own]
    # No --max-restarts: an agent that stays waits forever with the one that replaces a lost one
    # (seen with torch 2.15).
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}"]
    return [
        "torchrun",
        f"--nnodes={options.nodes}",
        f"--nproc-per-node={options.ranks}",
        *meet,
        *own,
    ]


def _variables(
    command: list[str] | None, options: KubernetesOptions, own: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the variables of a pod; the user's come before ours."""
    ours = dict(own or {})
    if command:
        ours[_LAUNCHER] = "kubernetes"
    if command and command[0] == "torchrun":  # would kill its ranks after 30 s
        ours[_RANKS_STOP_WAIT] = str(max(1, options.grace_s - _TORCHRUN_S))
    return {**options.env, **ours, **options.env}


def _service(name: str, options: KubernetesOptions) -> dict[str, Any]:
    """Return the headless Service that gives pods their host names, also before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {NAME_LABEL: name}}
    return _object("v1", "Service", name, spec, options)


def _pod(
    name: str,
    command: list[str] | None,
    options: KubernetesOptions,
    own: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a pod's template.

    Args:
        name: of the job.
        command: of its container; None: the image's, or the operator's.
        options: what the user set.
        own: variables beside those of each pod.
    """
    variables = _variables(command, options, own)
    mounts = [{"name": volume.name, **volume.mount} for volume in options.volumes]
    volumes = [{"name": volume.name, **volume.source} for volume in options.volumes]
    if options.shm_size is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}}
        )
    container: dict[str, Any] = {"name": "trainkit", "image": options.image}
    if command is not None:
        # else $(NAME) is a variable's value
        container["command"] = [word.replace("$(", "$$(") for word in command]
    fields = {
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        "envFrom": [{"secretRef": {"name": secret}} for secret in options.secrets],
        "resources": {"limits": dict(options.resources)} if options.resources else None,
        "volumeMounts": mounts,
        "securityContext": dict(options.security_context),
    }
    container |= {field: value for field, value in fields.items() if value}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        **options.pod,
    }
    spec |= {"containers": [container]}
    spec |= {"volumes": volumes} if volumes else {}
    return {"metadata": _metadata(name, options), "spec": spec}


def _metadata(name: str, options: KubernetesOptions) -> dict[str, Any]:
    own = {"labels": {NAME_LABEL: name, **options.labels}}
    return own | ({"annotations": dict(options.annotations)} if options.annotations else {})


def _object(
    version: str, kind: str, name: str, spec: dict[str, Any], options: KubernetesOptions
) -> dict[str, Any]:
    where = {} if options.namespace is None else {"namespace": options.namespace}
    metadata = {"name": name, **where, **_metadata(name, options)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
