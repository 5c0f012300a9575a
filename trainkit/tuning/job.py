"""One job inside a trial: a fit in processes of its own, which report to the trial (launch/trial.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.launch.elastic.processes import Reaper
from trainkit.launch.environment import without_launcher
from trainkit.launch.trial import Report, TrialServer

END_S = 60.0  # a run that is requested to stop ends within so long, or is killed


@dataclass(frozen=True)
class TrialJob:
    """A fit to run.

    Attributes:
        words: of the command `python -m trainkit fit`.
        folder: where the command is run; it holds the user's modules and conf/.
        output: the file for what it prints.
        num_workers: ranks.
        resources_per_worker: of each rank, as {"CPU": 1}.
        host: this node's address, which the ranks can reach.
    """

    words: Sequence[str]
    folder: Path
    output: Path
    num_workers: int
    resources_per_worker: Mapping[str, float]
    host: str

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "trainkit", "fit", *self.words]


def check_workers(num_workers: int) -> None:
    """Raise unless `run_job` can start so many ranks.

    Raises:
        ConfigError: it cannot.
    """
    if num_workers != 1:
        raise ConfigError(
            f"num_workers is {num_workers}; a trial has 1 rank. Give the rank more resources, or search with one rank and "
            "train the best trial with several."
        )


def run_job(job: TrialJob, environ: Mapping[str, str], report: Report) -> int:
    """Run a job to its end, passing its reports to `report`; return its exit code. If `report` raises, the job ends first."""
    check_workers(job.num_workers)
    server, reaper = TrialServer(job.host), Reaper()
    # Ray on a cluster that mpirun or srun started: their variables are not this job's.
    own = without_launcher(environ) | server.variables
    with job.output.open("ab") as output:
        process = subprocess.Popen(
            job.command, cwd=job.folder, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    reaper.tell("+", process.pid)
    ended: list[BaseException] = []

    def pass_on(metrics: dict[str, object], folder: str | None) -> bool:
        try:
            return report(metrics, folder)
        except BaseException as error:  # the search ends this trial: by SystemExit
            ended.append(error)
            return False

    try:
        server.serve(pass_on, lambda: process.poll() is None)
        code = process.wait(END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reaper.tell("-", process.pid)
        reaper.close()
        server.close()
    if ended:
        raise ended[0]
    return code
