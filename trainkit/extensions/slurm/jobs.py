"""The jobs that trainkit submitted, by what it left in their runs' folders, and what Slurm knows of
them.

RUN_DIR/slurm/jobs.jsonl has a line for each job of a run, the newest last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.extensions.slurm.programs import error_of, run_program
from trainkit.extensions.slurm.script import SLURM

_JOBS = "jobs.jsonl"
# What squeue and sacct print of a job.
_SQUEUE = "%i|%T|%r|%M|%L|%P|%N"
_SACCT = "JobIDRaw,State,Elapsed,Partition,NodeList"
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "GONE",
)


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job; `submitted` is its time, as text."""

    number: int
    run_dir: Path
    submitted: str

    @property
    def log(self) -> Path:
        """The file of the job's output."""
        return self.run_dir / SLURM / f"{self.number}.out"


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of a job; texts as Slurm writes them, "" for what it does not.

    Attributes:
        state: as "PENDING", "RUNNING", "COMPLETED"; "GONE" if Slurm has forgotten the job, and
            keeps no accounts.
        reason: why it waits.
    """

    state: str = "GONE"
    reason: str = ""
    elapsed: str = ""
    time_left: str = ""
    partition: str = ""
    nodes: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job neither runs nor waits."""
        return self.state in ENDED


def record(job: SubmittedJob) -> None:
    """Add a job to those of its run."""
    with (job.run_dir / SLURM / _JOBS).open("a") as file:
        file.write(json.dumps({"job": job.number, "submitted": job.submitted}) + "\n")


def jobs_of(run_dir: Path) -> list[SubmittedJob]:
    """Return the jobs of a run, the newest last."""
    try:
        lines = (run_dir / SLURM / _JOBS).read_text().splitlines()
    except OSError:
        return []
    submissions = [json.loads(line) for line in lines if line.endswith("}")]
    return [SubmittedJob(int(line["job"]), run_dir, str(line["submitted"])) for line in submissions]


def find_jobs(top: Path) -> list[SubmittedJob]:
    """Return the jobs of all runs in and below a folder, by their numbers."""
    return sorted(
        (job for folder in _runs(top) for job in jobs_of(folder)), key=lambda job: job.number
    )


def _runs(top: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(top):
        if (Path(folder) / SLURM / _JOBS).is_file():
            yield Path(folder)
            names.clear()  # a run holds no other
        names[:] = [name for name in names if not name.startswith(".")]


def states_of(jobs: Sequence[SubmittedJob]) -> dict[int, JobState]:
    """Ask Slurm for the states of jobs: squeue, and of those that it has forgotten sacct.

    Raises:
        ConfigError: squeue is not installed, or fails.
    """
    states = {job.number: JobState() for job in jobs}
    if not jobs:
        return states
    numbers = ",".join(str(job.number) for job in jobs)
    # Of a single unknown job squeue makes an error, of several it prints those that it knows.
    queue = run_program(
        "squeue", ["--noheader", "--states=all", f"--format={_SQUEUE}", f"--jobs={numbers}"]
    )
    if queue.returncode and "Invalid job id" not in queue.stderr:
        raise ConfigError(
            f"squeue failed, so that the jobs' states are unknown: {error_of(queue)}."
        )
    for line in queue.stdout.splitlines():
        number, state, reason, elapsed, left, partition, nodes = line.split("|")
        reason = "" if reason == "None" else reason
        states[int(number)] = JobState(
            state,
            reason,
            elapsed,
            left,
            partition,
            nodes,
        )
    if forgotten := ",".join(
        str(number) for number, state in states.items() if state.state == "GONE"
    ):
        accounts = run_program(
            "sacct",
            [
                "--noheader",
                "--parsable2",
                "--allocations",
                f"--format={_SACCT}",
                f"--jobs={forgotten}",
            ],
        )
        for line in accounts.stdout.splitlines():  # of a requeued job the newest start alone
            number, state, elapsed, partition, nodes = line.split("|")
            states[int(number)] = JobState(
                state.partition(" ")[0], elapsed=elapsed, partition=partition, nodes=nodes
            )
    return states
