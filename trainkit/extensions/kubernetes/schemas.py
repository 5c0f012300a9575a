"""Objects compared with Kubernetes' own schemas, before a cluster sees them.
The only home of kubernetes_validate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainkit.errors import ConfigError
from trainkit.extensions.kubernetes.train_job import pod_of

NOT_INSTALLED = "not compared with Kubernetes' schemas (pip install kubernetes-validate)"


def known(objects: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what Kubernetes itself knows of a manifest:
    of an operator's kind the job, or the pods, that it holds.
    """
    for one in objects:
        kind = one["kind"]
        spec = one.get("spec", {})
        if kind == "JobSet":
            for jobs in spec["replicatedJobs"]:
                yield {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": "a"},
                    **jobs["template"],
                }
        elif kind == "TrainJob":
            yield _as_pod(pod_of(spec))
        elif kind == "MPIJob":
            yield from (
                _as_pod(replicas["template"]) for replicas in spec["mpiReplicaSpecs"].values()
            )
        elif kind == "RayJob":
            cluster = spec["rayClusterSpec"]
            groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
            yield from (_as_pod(group["template"]) for group in groups)
        else:
            yield one


def check(objects: Sequence[dict[str, Any]]) -> str | None:
    """Compare a manifest with the schemas of the newest release that is known here.

    Returns:
        Why it was not compared; None if it was.

    Raises:
        ConfigError: a field is unknown, is missing, or has another type.
    """
    try:
        import kubernetes_validate  # type: ignore[import-untyped]
    except ImportError:
        return NOT_INSTALLED
    for one in known(objects):
        try:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(str(part) for part in error.path) or one["kind"]
            raise ConfigError(
                f"Kubernetes does not know this manifest, at {place}: {error.message}"
            ) from None
    return None


def _as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **template}
