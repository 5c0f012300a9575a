"""A TrainJob of Kubeflow Trainer 2.2 or newer: how a fit is described to a runtime of the cluster.

The runtime, by default torch-distributed, makes a JobSet of it, whose job is named "node", as its
container is. It gives torchrun the number of nodes and ranks, and where to meet, as variables; how
often pods start again is the runtime's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.arguments import show
from trainkit.errors import ConfigError

VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME = "torch-distributed"  # a ClusterTrainingRuntime that Kubeflow Trainer installs
_NODE = "node"  # that runtime's name for its job, and for the container
_MANAGER = "trainkit.launch/fit"  # whose patch of the runtime it is
# Of a pod's spec, what a TrainJob may patch (PodSpecPatch of its API).
_PATCHED = (
    "affinity",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "schedulingGates",
    "securityContext",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
)


def check_settings(given: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    """Compare the settings of KubernetesLauncher with what a TrainJob can say.

    Args:
        given: the settings, by their names.
        pod: further fields of the pods' spec.

    Raises:
        ConfigError: a TrainJob has no place for one of them, or it is of a TrainJob and another
            kind is asked for.
    """
    if given["kind"] != "TrainJob":
        if given["runtime"] is not None:
            raise ConfigError(
                f"launcher.runtime is {show(given['runtime'])}, and launcher.kind={given['kind']}"
                " has none: it is of launcher.kind=TrainJob. Leave it out."
            )
        return
    of_the_runtime = {
        "max_failures": "how often pods start again",
        "ttl_s": "when an ended job is removed",
        "priority_class": "the pods' priority",
    }
    for name, what in of_the_runtime.items():
        if given[name] is not None:
            raise ConfigError(
                f"launcher.{name} is {show(given[name])}, and a TrainJob cannot say {what}: its"
                " runtime does. Leave it out, or name a runtime that says so: launcher.runtime=..."
            )
    if given["env_from_secrets"]:
        raise ConfigError(
            f"launcher.env_from_secrets is {show(given['env_from_secrets'])}, and a TrainJob takes"
            " no variables from whole Secrets. Mount it, as launcher.volumes={keys: {mountPath:"
            " /keys, secret: {secretName: wandb}}}, or use launcher.kind=JobSet."
        )
    if unknown := sorted(pod.keys() - set(_PATCHED)):
        raise ConfigError(
            f"launcher.pod_spec has {', '.join(unknown)}, and a TrainJob may set of its pods only"
            f" {', '.join(_PATCHED)}. Leave it out, or name a runtime that has it:"
            " launcher.runtime=..."
        )


def spec_of(pod: Mapping[str, Any], runtime: str, nodes: int, ranks: int) -> dict[str, Any]:
    """Return the spec of a TrainJob.

    Args:
        pod: the template of a pod, with one container, as a Job would have it.
        runtime: the name of a ClusterTrainingRuntime.
        nodes, ranks: number of pods, and of ranks in each.
    """
    spec = pod["spec"]
    (container,) = spec["containers"]
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "numNodes": nodes,
        "numProcPerNode": ranks,
    }
    trainer |= {"env": container["env"]} if "env" in container else {}
    trainer |= {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    patch = {field: spec[field] for field in ("volumes", *_PATCHED) if field in spec}
    mounted = {
        field: container[field]
        for field in ("volumeMounts", "securityContext")
        if field in container
    }
    if mounted:
        patch["containers"] = [{"name": _NODE, **mounted}]
    template = {"metadata": pod["metadata"], "spec": patch}
    jobs = [{"name": _NODE, "template": {"spec": {"template": template}}}]
    return {
        "runtimeRef": {"name": runtime},
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": _MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
            }
        ],
    }


def pod_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod that a runtime makes of that spec, as far as a TrainJob says it."""
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patch = dict(job["template"]["spec"]["template"]["spec"])
    trainer = spec["trainer"]
    own = {field: trainer[field] for field in ("image", "command", "env") if field in trainer}
    resources = {"resources": trainer["resourcesPerNode"]} if "resourcesPerNode" in trainer else {}
    (mounted,) = patch.pop("containers", [{}])
    return {
        "metadata": {"name": "a"},
        "spec": {**patch, "containers": [{"name": _NODE, **mounted, **own, **resources}]},
    }
