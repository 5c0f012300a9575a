"""What a user sets for a job on Kubernetes, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.arguments import show
from trainkit.errors import ConfigError
from trainkit.extensions.kubernetes import train_job
from trainkit.extensions.kubernetes.volumes import Volume, volume_of

KINDS = ("Job", "JobSet", "TrainJob", "MPIJob", "RayJob")
NAME_LABEL = "app.kubernetes.io/name"  # of all objects and pods
_MAX_FAILURES = 10
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST = 50  # letters of a name: pods' names add to it, and may have 63
# what namespaces of Pod Security "restricted" require of each container
RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTPE]|[KMGTPE]i)?")
_UNITS = {
    "m": 1e-3,
    **{unit: 1000.0**power for power, unit in enumerate(("", *"kMGTPE"))},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
_OF_BYTES = ("memory", "shm_size")
_LEAST_BYTES = 1024**2  # no process starts in less: the unit was forgotten


@dataclass(frozen=True)
class KubernetesOptions:
    """Checked options.

    Attributes:
        kind: of the object: one of KINDS.
        runtime: of a TrainJob.
        image: that holds trainkit.
        nodes, ranks: number of pods, and of ranks in each.
        max_nodes: what a RayJob grows to; nodes for other kinds.
        resources: limits of each pod, by Kubernetes' names.
        head: limits of the pod that trains nothing: a RayJob's head, an MPIJob's launcher.
        volumes: of all pods.
        env: variables of the ranks.
        secrets: names of Secrets; their entries are variables of the ranks.
        pod: further fields of the pods' spec.
        security_context: of each container.
        labels, annotations: of all objects and pods.
        namespace: None for the one of kubectl's context.
        shm_size: of /dev/shm, which loader workers use; None for the runtime's.
        max_failures: so often the job may lose a pod, or fail, and start again.
        grace_s: seconds between a pod's SIGTERM and its end.
        ttl_s: seconds until the ended job is removed; None for never.
    """

    kind: str
    runtime: str
    image: str
    nodes: int
    max_nodes: int
    ranks: int
    resources: Mapping[str, str]
    head: Mapping[str, str]
    volumes: tuple[Volume, ...]
    env: Mapping[str, str]
    secrets: tuple[str, ...]
    pod: Mapping[str, Any]
    security_context: Mapping[str, Any]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    namespace: str | None
    shm_size: str | None
    max_failures: int
    grace_s: int
    ttl_s: int | None

    @property
    def where(self) -> list[str]:
        """The words with which kubectl takes the namespace."""
        return ["-n", self.namespace] if self.namespace else []


def options_of(given: Mapping[str, Any]) -> KubernetesOptions:
    """Check the settings of KubernetesLauncher, by their names.

    Raises:
        ConfigError: a setting is not legal.
    """
    if given["kind"] not in KINDS:
        raise ConfigError(
            f"launcher.kind is {show(given['kind'])}; it must be one of {', '.join(KINDS)}."
        )
    image = given["image"]
    if not isinstance(image, str) or not image or not image.isprintable() or " " in image:
        raise ConfigError(
            f"launcher.image is {show(image)}; it must be an image that holds trainkit, as"
            " registry.example.com/trainkit:1 (the Dockerfile in trainkit's repository builds"
            " one)."
        )
    nodes, max_nodes = _nodes(given["nodes"], given["kind"])
    _check_count("grace_s", given["grace_s"], 1, optional=False)
    for name, least in (
        ("gpus_per_node", 1),
        ("nproc_per_node", 1),
        ("max_failures", 0),
        ("ttl_s", 0),
    ):
        _check_count(name, given[name], least, optional=True)
    gpus = given["gpus_per_node"]
    ranks = given["nproc_per_node"] or given["gpus_per_node"] or 1
    if gpus is not None and ranks > gpus:
        raise ConfigError(
            f"launcher.nproc_per_node is {ranks}, and launcher.gpus_per_node is {gpus}: each rank"
            " takes a GPU. Leave nproc_per_node out, or ask for more GPUs."
        )
    resources = {
        name: _quantity(name, given[name]) for name in ("cpu", "memory") if given[name] is not None
    }
    shm_size = given["shm_size"]
    if gpus is not None:
        resources[given["gpu_resource"]] = str(gpus)
    pod = _pod(given)
    train_job.check_settings(given, pod)
    return KubernetesOptions(
        kind=given["kind"],
        runtime=_name("runtime", given["runtime"]) or train_job.RUNTIME,
        image=image,
        nodes=nodes,
        max_nodes=max_nodes,
        ranks=ranks,
        resources=resources,
        head=_head(given["head_resources"], given["kind"]),
        volumes=tuple(
            volume_of(name, one)
            for name, one in _mapping("volumes", given["volumes"], "{claim: /path}").items()
        ),
        env=_texts("env", given["env"], "{NCCL_DEBUG: INFO}"),
        secrets=_secrets(given["env_from_secrets"]),
        pod=pod,
        security_context=_security(given["security_context"]),
        labels=_labels(given["labels"]),
        annotations=_texts("annotations", given["annotations"], "{team: vision}"),
        namespace=_name("namespace", given["namespace"]),
        shm_size=None if shm_size is None else _quantity("shm_size", shm_size),
        max_failures=_MAX_FAILURES if given["max_failures"] is None else given["max_failures"],
        grace_s=given["grace_s"],
        ttl_s=given["ttl_s"],
    )


def name_of(text: str, is_given: bool) -> str:
    """Return the name of a job's objects: the given one if it is legal, or one made of a config's
    name.

    Raises:
        ConfigError: it is given, and not legal.
    """
    if not is_given:
        text = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MOST].strip("-")
        return text if _NAME.fullmatch(text) else f"fit-{text}".strip("-")
    _name("job_name", text)
    return text


def _quantity(name: str, given: Any) -> str:
    text = str(given)
    if not _QUANTITY.fullmatch(text):
        raise ConfigError(
            f"launcher.{name} is {show(given)}; it must be a quantity as Kubernetes takes it: 8,"
            " 64Gi."
        )
    if name.endswith(_OF_BYTES) and (amount := amount_of(text)) < _LEAST_BYTES:
        raise ConfigError(
            f"launcher.{name} is {show(given)}, which Kubernetes reads as {amount:g} bytes. Write"
            " the unit after the number, as 64Gi or 500Mi; m is a thousandth."
        )
    return text


def amount_of(quantity: str) -> float:
    """Return the number of a legal quantity: 8 of 8000m, 1024 of 1Ki."""
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None
    return float(match[1]) * _UNITS[match[2] or ""]


def _name(setting: str, text: Any) -> str | None:
    if text is not None and (
        not isinstance(text, str) or len(text) > _MOST or not _NAME.fullmatch(text)
    ):
        raise ConfigError(
            f"launcher.{setting} is {show(text)}; it must be a name as Kubernetes takes it: small"
            f" letters, digits and '-', a letter first, at most {_MOST}."
        )
    return text


def _check_count(name: str, value: Any, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"launcher.{name} is {show(value)}; it must be a whole number, {least} or more."
        )


def _mapping(name: str, value: Any, example: str) -> Mapping[str, Any]:
    mapping = value or {}
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) and key for key in mapping):
        raise ConfigError(f"launcher.{name} is {show(value)}; it must be a mapping, as {example}.")
    return mapping


def _nodes(given: Any, kind: str) -> tuple[int, int]:
    """Return the number of pods that train, and what it may grow to."""
    several = given if isinstance(given, (list, tuple)) else [given]
    if len(several) == 2 and kind != "RayJob":
        raise ConfigError(
            f"launcher.nodes is {show(given)}, a range, which launcher.kind=RayJob alone can use;"
            " give one number."
        )
    for count in several:
        if (
            len(several) > 2
            or not isinstance(count, int)
            or isinstance(count, bool)
            or count < 1
            or count < several[0]
        ):
            raise ConfigError(
                f"launcher.nodes is {show(given)}; it must be a whole number, 1 or more (with"
                " launcher.kind=RayJob also a range, as [2,8])."
            )
    if not several:
        raise ConfigError("launcher.nodes is []; it must be a whole number, 1 or more.")
    return several[0], several[-1]


def _head(given: Any, kind: str) -> dict[str, str]:
    resources = _texts("head_resources", given, "{cpu: 4, memory: 16Gi}")
    if resources and kind not in ("MPIJob", "RayJob"):
        raise ConfigError(
            f"launcher.head_resources is {show(given)}, and launcher.kind={kind} has no pod that"
            " trains nothing: it is of RayJob's head and MPIJob's launcher. Leave it out."
        )
    return {name: _quantity(f"head_resources.{name}", one) for name, one in resources.items()}


def _security(given: Any) -> Mapping[str, Any]:
    if given == "restricted":
        return RESTRICTED
    if isinstance(given, str):
        raise ConfigError(
            f"launcher.security_context is {show(given)}; it must be restricted, or a mapping:"
            " {runAsUser: 1000}."
        )
    return _mapping("security_context", given, "{runAsUser: 1000}")


def _texts(name: str, given: Any, example: str) -> dict[str, str]:
    """Return a mapping of texts; true and false as YAML and Kubernetes write them."""
    texts = {}
    for key, value in _mapping(name, given, example).items():
        if not isinstance(value, (str, int, float)):
            instead = " Leave it out, or give ''." if value is None else ""
            raise ConfigError(
                f"launcher.{name}.{key} is {show(value)}; it must be a text.{instead}"
            )
        texts[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def _labels(given: Any) -> dict[str, str]:
    labels = _texts("labels", given, "{kueue.x-k8s.io/queue-name: team}")
    if NAME_LABEL in labels:
        raise ConfigError(
            f"launcher.labels has '{NAME_LABEL}', by which the pods of a job know each other, and"
            " `jobs` knows them. Use another key, or name the job: launcher.job_name=..."
        )
    return labels


def _secrets(given: Any) -> tuple[str, ...]:
    names = [] if given is None else given
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and name for name in names
    ):
        raise ConfigError(
            f"launcher.env_from_secrets is {show(given)}; it must be a list of Secrets' names, as"
            " [wandb]."
        )
    return tuple(names)


def _pod(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return further fields of the pods' spec:
    those with settings of their own, and launcher.pod_spec.
    """
    pod: dict[str, Any] = dict(_mapping("pod_spec", given["pod_spec"], "{schedulerName: volcano}"))
    own = {
        "nodeSelector": (
            "node_selector",
            _texts("node_selector", given["node_selector"], "{pool: gpu}"),
        ),
        "tolerations": ("tolerations", given["tolerations"]),
        "serviceAccountName": ("service_account", given["service_account"]),
        "priorityClassName": ("priority_class", given["priority_class"]),
        "imagePullSecrets": (
            "image_pull_secrets",
            [{"name": name} for name in given["image_pull_secrets"] or ()],
        ),
    }
    for field, (setting, value) in own.items():
        if not value:
            continue
        if field in pod:
            raise ConfigError(
                f"launcher.pod_spec has '{field}', which is a setting of its own:"
                f" launcher.{setting}=..."
            )
        pod[field] = value
    if "terminationGracePeriodSeconds" in pod:  # what ends the ranks in time counts from it
        raise ConfigError(
            "launcher.pod_spec has 'terminationGracePeriodSeconds', which is a setting of its own:"
            " launcher.grace_s=..."
        )
    for field in ("containers", "restartPolicy", "volumes", "subdomain", "hostname"):
        if field in pod:
            raise ConfigError(
                f"launcher.pod_spec has '{field}', which launcher=kubernetes sets. Leave it out."
            )
    if not isinstance(pod.get("tolerations", []), (list, tuple)):
        raise ConfigError(
            f"launcher.tolerations is {show(given['tolerations'])}; it must be a list, as [{{key:"
            " gpu, operator: Exists}]."
        )
    return pod
