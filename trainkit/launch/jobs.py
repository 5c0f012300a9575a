"""Jobs on a cluster, as `trainkit jobs` sees them:
Slurm, Kubernetes and Ray answer the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class JobRow:
    """A job, and what its cluster knows of it; texts as the cluster writes them, "" for what it
    does not know.

    Attributes:
        job: a number on Slurm, a name on Kubernetes, a submission id on Ray.
        state: "GONE" if the cluster has forgotten the job.
        reason: why it waits, or has failed.
        where: what identifies it to a user: a run's folder, a manifest, a command.
        run_dir: the run's folder, if it is on this machine.
        more: further facts for --json.
    """

    job: str
    state: str
    where: str
    reason: str = ""
    elapsed: str = ""
    time_left: str = ""
    nodes: str = ""
    run_dir: Path | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


class Cluster(Protocol):
    """A place that jobs are submitted to."""

    name: str

    def rows(self, top: Path) -> list[JobRow]:
        """Return the jobs of runs in and below a folder, the oldest first; [] where trainkit
        submitted none here.

        Raises:
            ConfigError: there are some, and the cluster does not answer.
        """

    def has(self, job: str) -> bool:
        """Return whether a word of the command line is a job of this cluster."""

    def print_log(self, job: str, lines: int | None) -> None:
        """Print a job's output, or its last lines.

        Raises:
            ConfigError: there is none, or the cluster does not answer.
        """

    def cancel(self, job: str) -> str:
        """End a job; return a sentence: what happens to it, and how to resume.

        Raises:
            ConfigError: it is over, or the cluster does not answer.
        """
