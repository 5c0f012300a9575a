"""Kubernetes for `trainkit jobs`: by the manifests that launcher=kubernetes left, and kubectl."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainkit.errors import ConfigError
from trainkit.extensions.jobs.elapsed import elapsed_of
from trainkit.extensions.kubernetes.kubectl import error_of, run_kubectl
from trainkit.extensions.kubernetes.launcher import FOLDER
from trainkit.extensions.kubernetes.options import KINDS, NAME_LABEL
from trainkit.launch.jobs import JobRow

# The conditions of the five kinds, the ones that say most first.
_ENDED = {
    "Complete": "COMPLETED",
    "Completed": "COMPLETED",
    "Succeeded": "COMPLETED",
    "Failed": "FAILED",
}
_OF_RAY = {"SUCCEEDED": "COMPLETED", "FAILED": "FAILED", "STOPPED": "CANCELLED"}
_MOST_PODS = 64  # whose output kubectl reads at a time


@dataclass(frozen=True)
class _Job:
    """The object of a fit: its kind with the API's group, as kubectl takes it."""

    name: str
    kind: str
    group: str
    namespace: str | None
    manifest: Path

    @property
    def where(self) -> list[str]:
        return ["-n", self.namespace] if self.namespace else []

    @property
    def resource(self) -> str:
        return f"{self.kind}.{self.group}".lower()


class KubernetesCluster:
    """The jobs whose manifests are in the current folder's kubernetes/."""

    name = "kubernetes"

    def rows(self, top: Path) -> list[JobRow]:
        """Return the jobs whose manifests are here;
        they are no folders of runs, which are in the cluster.
        """
        files = sorted(Path(FOLDER).glob("*.yaml"), key=lambda file: file.stat().st_mtime)
        return [
            self._row(_read(file))
            if os.access(file, os.R_OK)
            else JobRow(file.stem, "UNKNOWN", str(file), "only its owner may read its manifest")
            for file in files
        ]

    def has(self, job: str) -> bool:
        """Return whether it is the name of a manifest here, or its file."""
        return _file_of(job).is_file()

    def print_log(self, job: str, lines: int | None) -> None:
        """Print the output of a job's pods, each line with its pod;
        of a RayJob that of its driver.
        """
        one = _read(_file_of(job))
        of_pods = ["-l", f"{NAME_LABEL}={one.name}", "--prefix", f"--max-log-requests={_MOST_PODS}"]
        # KubeRay runs the command in a Job of the RayJob's name; the pods with our label are Ray's
        # own.
        whose = [f"job/{one.name}"] if one.kind == "RayJob" else of_pods
        done = run_kubectl(["logs", *whose, f"--tail={-1 if lines is None else lines}", *one.where])
        print(done.stdout, end="")
        if done.returncode:
            raise ConfigError(f"kubectl has no output of job {one.name}: {error_of(done)}.")
        if not done.stdout:
            row = self._row(one)
            why = f" ({row.reason})" if row.reason else ""
            raise ConfigError(f"Job {one.name} has no output: it is {row.state}{why}.")

    def cancel(self, job: str) -> str:
        """Delete a job's objects: pods get SIGTERM, and running ranks save a checkpoint. Those that
        an ended job has left would keep its name.
        """
        one = _read(_file_of(job))
        row = self._row(one)
        done = run_kubectl(
            ["delete", "-f", str(one.manifest), "--ignore-not-found", "--wait=false", "-o", "name"]
        )
        if done.returncode:
            raise ConfigError(f"kubectl did not delete job {one.name}: {error_of(done)}.")
        if row.state not in ("PENDING", "RUNNING", "SUSPENDED"):
            if not (left := done.stdout.split()):
                raise ConfigError(
                    f"Job {one.name} is {row.state} already; there is nothing to cancel."
                )
            return (
                f"job {one.name} is {row.state} already: what it had left in the cluster is deleted"
                f" ({', '.join(left)}), and its name is free"
            )
        what = "the ranks save a checkpoint and end"
        if row.state != "RUNNING":
            what = "it had not started"
        elif one.kind == "MPIJob":  # sshd of its workers ends at SIGTERM, and their ranks with it
            what = "the ranks end at once, and lose the steps since their last checkpoint"
        return f"job {one.name} is cancelled: {what}. To resume: kubectl create -f {one.manifest}"

    def _row(self, one: _Job) -> JobRow:
        given = _get([one.resource, one.name, "--ignore-not-found", *one.where])
        more = {"kind": one.kind, "namespace": one.namespace, "manifest": str(one.manifest)}
        if not given:
            return JobRow(one.name, "GONE", str(one.manifest), more=more)
        state, reason = _end_of(given)
        nodes = ""
        if not state:
            pods = _get(["pods", "-l", f"{NAME_LABEL}={one.name}", *one.where]).get("items", [])
            state, reason = _state_of_pods(pods)
            running = sum(pod["status"].get("phase") == "Running" for pod in pods)
            nodes = f"{running}/{len(pods)} pods"
        began = datetime.fromisoformat(
            given["metadata"]["creationTimestamp"].replace("Z", "+00:00")
        )
        elapsed = (
            ""
            if state in _ENDED.values()
            else elapsed_of((datetime.now(timezone.utc) - began).total_seconds())
        )
        return JobRow(
            one.name,
            state,
            str(one.manifest),
            reason,
            elapsed,
            nodes=nodes,
            more=more,
        )


def _file_of(job: str) -> Path:
    return Path(job) if job.endswith(".yaml") else Path(FOLDER) / f"{job}.yaml"


def _read(file: Path) -> _Job:
    try:
        objects = [one for one in yaml.safe_load_all(file.read_text()) if isinstance(one, Mapping)]
        (job,) = (one for one in objects if one.get("kind") in KINDS)
        metadata = job["metadata"]
        group = str(job["apiVersion"]).partition("/")[0]
        return _Job(metadata["name"], job["kind"], group, metadata.get("namespace"), file)
    except PermissionError:
        raise ConfigError(
            f"{file} may be read by its owner alone, as that of a job with secrets: ask its owner,"
            f" or Kubernetes: kubectl get pods -l {NAME_LABEL}={file.stem}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} is no manifest of a fit ({type(error).__name__}): launcher=kubernetes writes"
            f" one for each job. Move other files out of {FOLDER}/."
        ) from None


def _get(arguments: Sequence[str]) -> dict[str, Any]:
    done = run_kubectl(["get", *arguments, "-o", "json"])
    if done.returncode:
        raise ConfigError(
            f"kubectl failed, so that the jobs' states are unknown: {error_of(done)}."
        )
    return dict(json.loads(done.stdout)) if done.stdout.strip() else {}


def _end_of(given: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a job has ended, or that it is suspended, and why; "" if its pods say more."""
    status = given.get("status") or {}
    if state := _OF_RAY.get(status.get("jobStatus", "")):
        return state, str(status.get("message", ""))
    holds = {
        one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"
    }
    for condition, state in _ENDED.items():
        if condition in holds:
            return state, _why(holds[condition]) if state == "FAILED" else ""
    if "Suspended" in holds:  # as a queue does until there is room
        return "SUSPENDED", _why(holds["Suspended"])
    return "", ""


def _state_of_pods(pods: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return RUNNING if all pods run, else PENDING, and why the first of them waits."""
    waiting = [pod for pod in pods if pod["status"].get("phase") == "Pending"]
    if pods and not waiting:
        return "RUNNING", ""
    for pod in waiting:
        for condition in pod["status"].get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return "PENDING", _why(condition)
        for container in pod["status"].get("containerStatuses") or ():
            if why := container["state"].get("waiting"):
                return "PENDING", _why(why)
    return "PENDING", ""


def _why(condition: Mapping[str, Any]) -> str:
    return ": ".join(
        str(condition[field]) for field in ("reason", "message") if condition.get(field)
    )
