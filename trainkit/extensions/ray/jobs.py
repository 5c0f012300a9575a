"""Ray for `trainkit jobs`: the jobs of `ray job submit` whose command is trainkit's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError
from trainkit.extensions.jobs.elapsed import elapsed_of
from trainkit.extensions.ray.connection import load_ray
from trainkit.launch.jobs import JobRow

_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # that `ray job` reads
_STATES = {"SUCCEEDED": "COMPLETED", "STOPPED": "CANCELLED"}  # the others' names are Slurm's too


class RayCluster:
    """The jobs of the cluster that RAY_API_SERVER_ADDRESS or RAY_ADDRESS names."""

    name = "ray"

    def rows(self, top: Path) -> list[JobRow]:
        """Return the jobs whose command is trainkit's;
        their runs' folders are those of the cluster.
        """
        if not any(os.environ.get(name) for name in _ADDRESSES):
            return []
        jobs = [
            job
            for job in self._client().list_jobs()
            if job.submission_id and "trainkit" in job.entrypoint
        ]
        return [_row(job) for job in sorted(jobs, key=lambda job: job.start_time or 0)]

    def has(self, job: str) -> bool:
        """Return whether it is a submission id of Ray's making,
        or any word where no other cluster knows it.
        """
        return any(os.environ.get(name) for name in _ADDRESSES)

    def print_log(self, job: str, lines: int | None) -> None:
        """Print the output of a job's driver."""
        client = self._client()
        row = _row(self._job(client, job))
        text = client.get_job_logs(job)
        if not text:
            raise ConfigError(
                f"Job {job} has no output: it is"
                f" {row.state}{f' ({row.reason})' if row.reason else ''}."
            )
        print("".join(text.splitlines(keepends=True)[-lines if lines else 0 :]), end="")

    def cancel(self, job: str) -> str:
        """Stop a job: its driver gets SIGTERM, and the ranks save a checkpoint."""
        client = self._client()
        row = _row(self._job(client, job))
        if row.state not in ("PENDING", "RUNNING"):
            raise ConfigError(f"Job {job} is {row.state} already; there is nothing to cancel.")
        client.stop_job(job)
        what = (
            "the ranks save a checkpoint and end"
            if row.state == "RUNNING"
            else "it had not started"
        )
        return (
            f"job {job} is cancelled: {what}. To resume: submit the same command, with resume=auto"
            " and its run_dir"
        )

    def _client(self) -> Any:
        submission = load_ray(
            "ray.job_submission", "trainkit jobs, with an address of Ray in the environment,"
        )
        try:
            return submission.JobSubmissionClient()
        except (ConnectionError, RuntimeError, ValueError) as error:
            address = next(
                f"{name}={os.environ[name]}" for name in _ADDRESSES if os.environ.get(name)
            )
            raise ConfigError(
                f"{address}, and its jobs cannot be read ({str(error).splitlines()[0]}). Give the"
                " address of the dashboard, as RAY_API_SERVER_ADDRESS=http://head:8265, or"
                " unset it."
            ) from None

    def _job(self, client: Any, job: str) -> Any:
        for one in client.list_jobs():
            if one.submission_id == job:
                return one
        raise ConfigError(
            f"Ray knows no job '{job}'. `python -m trainkit jobs` lists those of trainkit, `ray job"
            " list` all."
        )


def _row(job: Any) -> JobRow:
    state = str(job.status.value)
    end = job.end_time / 1000 if job.end_time else time.time()
    return JobRow(
        job=job.submission_id,
        state=_STATES.get(state, state),
        reason=(
            (job.message or "").splitlines()[0]
            if state in ("FAILED", "PENDING") and job.message
            else ""
        ),
        elapsed=elapsed_of(end - job.start_time / 1000) if job.start_time else "",
        where=job.entrypoint,
    )
