"""Slurm for `trainkit jobs`: by the run's folders that launcher=slurm wrote, squeue,
sacct and scancel.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.extensions.slurm.jobs import SubmittedJob, find_jobs, jobs_of, states_of
from trainkit.extensions.slurm.programs import error_of, run_program
from trainkit.launch.jobs import JobRow

_RUNS = "runs"


class SlurmCluster:
    """The jobs that launcher=slurm submitted."""

    name = "slurm"

    def rows(self, top: Path) -> list[JobRow]:
        """Return the jobs of runs in and below a folder."""
        jobs = find_jobs(top.absolute())
        states = states_of(jobs)
        rows = []
        for job in jobs:
            state = states[job.number]
            rows.append(
                JobRow(
                    job=str(job.number),
                    state=state.state,
                    reason=state.reason,
                    elapsed=state.elapsed,
                    time_left=state.time_left,
                    nodes=state.nodes,
                    where=os.path.relpath(job.run_dir),
                    run_dir=job.run_dir,
                    more={
                        "job": job.number,
                        "submitted": job.submitted,
                        "log": str(job.log),
                        "partition": state.partition,
                    },
                )
            )
        return rows

    def has(self, job: str) -> bool:
        """Return whether it is a number, or the folder of a run that was submitted."""
        return job.isdecimal() or bool(jobs_of(Path(job).absolute()))

    def print_log(self, job: str, lines: int | None) -> None:
        """Print the output file of a job."""
        submitted = _job(job)
        if not submitted.log.is_file():
            state = states_of([submitted])[submitted.number]
            why = f" ({state.reason})" if state.reason else ""
            raise ConfigError(
                f"Job {submitted.number} has no output yet: it is {state.state}{why}; its file will"
                f" be {submitted.log}."
            )
        with submitted.log.open(errors="replace") as file:
            sys.stdout.writelines(file if lines is None else deque(file, lines))

    def cancel(self, job: str) -> str:
        """End a job by scancel: running ranks save a checkpoint."""
        submitted = _job(job)
        state = states_of([submitted])[submitted.number]
        if state.is_over:
            raise ConfigError(
                f"Job {submitted.number} is {state.state} already; there is nothing to cancel."
            )
        done = run_program("scancel", [str(submitted.number)])
        if done.returncode:
            raise ConfigError(f"scancel did not end job {submitted.number}: {error_of(done)}.")
        what = (
            "the ranks save a checkpoint and end"
            if state.state == "RUNNING"
            else "it had not started"
        )
        again = f"the same command, with run_dir={os.path.relpath(submitted.run_dir)}"
        return f"job {submitted.number} is cancelled: {what}. To resume: {again}"


def _job(given: str) -> SubmittedJob:
    if not given.isdecimal():
        return jobs_of(Path(given).absolute())[-1]
    for job in find_jobs(Path(_RUNS).absolute()):
        if job.number == int(given):
            return job
    raise ConfigError(
        f"No run below {_RUNS}/ was submitted as job {given}. Give the run's folder, or use scancel"
        " and scontrol."
    )
