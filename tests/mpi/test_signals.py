"""Signals to mpirun: SIGUSR1 reaches the ranks at once;
SIGTERM after a while that Open MPI lets one set.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.helpers.journals import check_samples
from tests.mpi.jobs import FIT, JOURNAL, Job
from trainkit.checkpoint.format import verify

# SIGTERM comes so many seconds late, and SIGKILL so many after it: a loaded machine needs more than
# the default of 1 s.
PATIENT = "--mca odls_base_sigkill_timeout 10"


def signalled(number: signal.Signals, line: str, folder: Path) -> int:
    """Start a job, signal mpirun while it trains, check the ranks' common checkpoint,
    and return the exit code.
    """
    with Job.start(folder, line) as job:
        job.wait_for_step(1)
        os.kill(job.process.pid, number)
        code = job.end()
        ended = re.search(
            rf"{number.name} on rank 0, {number.name} on rank 1: the run ended after step (\d+); to"
            r" resume",
            job.text,
        )
        assert ended, job.text
        assert verify((folder / "run" / "checkpoints" / "last").resolve())["global_step"] == int(
            ended[1]
        )
    return code


def test_sigusr1_is_forwarded(tmp_path: Path) -> None:
    """To all ranks, at once: they end after the same step with a checkpoint,
    and the job with their exit code.
    """
    assert (
        signalled(signal.SIGUSR1, f"exec mpirun -np 2 {FIT} {JOURNAL} task.pause_s=0.5", tmp_path)
        == 75
    )


def test_a_job_that_is_asked_to_end_resumes(tmp_path: Path) -> None:
    """SIGTERM comes late, but comes;
    the same command resumes after the step, and no sample is lost or trained twice.
    """
    line = f"exec mpirun {PATIENT} -np 2 {FIT} {JOURNAL} resume=auto task.pause_s=0.5"
    assert signalled(signal.SIGTERM, line, tmp_path) != 0
    with Job.start(tmp_path, line) as job:
        job.hurry()
        assert job.end() == 0, job.text
        check_samples(job)
