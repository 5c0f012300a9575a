"""One job inside a trial: a fit in processes of its own, one or several,
which report to the trial (launch/trial.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.processes import Reaper
from trainkit.extensions.ray.options import ELASTIC, RayOptions
from trainkit.extensions.ray.tuning.link import Report, TrialServer
from trainkit.launch.environment import without_launcher
from trainkit.safety.threads import start_thread

# waits for so many seconds; returns the exit code of a job that has ended
Poll = Callable[[float], "int | None"]
END_S = 60.0  # a run that is requested to stop ends within so long, or is killed


@dataclass(frozen=True)
class TrialJob:
    """A fit to run.

    Attributes:
        arguments: of the command `python -m trainkit fit`.
        folder: where the command is run; it holds the user's modules and conf/.
        output: the file for what it prints.
        num_workers: ranks.
        resources_per_worker: of each rank, as {"CPU": 1}.
        host: this node's address, which the ranks can reach.
    """

    arguments: Sequence[str]
    folder: Path
    output: Path
    num_workers: int
    resources_per_worker: Mapping[str, float]
    host: str

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "trainkit", "fit", *self.arguments]


def run_job(job: TrialJob, environ: Mapping[str, str], report: Report) -> int:
    """Run a job to its end, passing its reports to `report`; return its exit code.
    If `report` raises, the job ends first.
    """
    ended: list[BaseException] = []

    def pass_on(metrics: dict[str, object], folder: str | None) -> bool:
        try:
            return report(metrics, folder)
        except BaseException as error:  # the search ends this trial: by SystemExit
            ended.append(error)
            return False

    with contextlib.closing(TrialServer(job.host)) as server:
        start = _in_one_process if job.num_workers == 1 else _on_ranks
        with start(job, dict(environ) | server.variables) as poll:
            server.serve(pass_on, lambda: poll(0) is None)
            code = poll(END_S)
    if ended:
        raise ended[0]
    return 1 if code is None else code


@contextlib.contextmanager
def _in_one_process(job: TrialJob, environ: Mapping[str, str]) -> Iterator[Poll]:
    reaper = Reaper()
    # Ray on a cluster that mpirun or srun started: their variables are not this job's.
    own = without_launcher(environ)
    with job.output.open("ab") as output:
        process = subprocess.Popen(
            job.command,
            cwd=job.folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    reaper.tell("+", process.pid)

    def poll(wait_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(wait_s)
        return None

    try:
        yield poll
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reaper.tell("-", process.pid)
        reaper.close()


@contextlib.contextmanager
def _on_ranks(job: TrialJob, environ: Mapping[str, str]) -> Iterator[Poll]:
    """Run the job under the elastic driver, in the bundles of the trial's own placement group."""
    ranks = importlib.import_module("trainkit.extensions.ray.job")
    options = RayOptions(job.num_workers, job.num_workers, dict(job.resources_per_worker))
    codes: list[int] = []
    drivers: list[Any] = []

    def run() -> None:
        with job.output.open("a") as file:
            try:
                command = ["python", *job.command[1:], ELASTIC]
                output = WorkerOutput(None, False, file)
                run_dir = str(job.output.parent)
                code, _ = ranks.run_job(
                    options,
                    command,
                    str(job.folder),
                    run_dir,
                    environ=environ,
                    output=output,
                    on_start=drivers.append,
                )
                codes.append(code)
            except TrainkitError as error:
                file.write(f"Error: {error}\n")
                codes.append(error.exit_code)

    def fail(error: BaseException) -> None:
        with job.output.open("a") as file:
            file.writelines(traceback.format_exception(error))
        codes.append(1)

    thread = start_thread("ranks of a trial", run, fail)

    def poll(wait_s: float) -> int | None:
        thread.join(wait_s)
        return None if thread.is_alive() else codes[0]

    try:
        yield poll
    finally:
        if thread.is_alive():
            for driver in drivers:
                driver.post(lambda now: driver.state_machine.signalled(now, signal.SIGTERM))  # noqa: B023 - one at most
            thread.join(END_S)
