"""jobs: the jobs that launcher=slurm submitted; `jobs logs` prints the output of one, `jobs cancel` ends one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from trainkit.cli.guard import main_alone
from trainkit.cli.options import count, read_keys
from trainkit.cli.usage import USAGES, usage_of
from trainkit.console import console_of, short
from trainkit.errors import ConfigError
from trainkit.launch.slurm.jobs import Job, find_jobs, jobs_of, states_of
from trainkit.launch.slurm.programs import error_of, run_program
from trainkit.run.state import read_state

_RUNS = "runs"


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return main_alone(arguments, usage_of(command), lambda: _work(arguments))


def _work(arguments: Sequence[str]) -> None:
    action = arguments[0] if arguments and arguments[0] in ("logs", "cancel") else "list"
    rest = [argument for argument in arguments[action != "list" :] if argument != "--json"]
    keys = USAGES["jobs"].keys() if action == "logs" else {}
    places = [argument for argument in rest if "=" not in argument or Path(argument).is_dir()]
    given = read_keys([argument for argument in rest if argument not in places], keys, "jobs")
    if len(places) > 1:
        raise ConfigError(f"'{places[1]}' is one too many: jobs takes one folder, or logs or cancel and one job.")
    if action == "list":
        _list(Path(places[0] if places else _RUNS), as_json="--json" in arguments)
        return
    if not places:
        raise ConfigError(f"jobs {action} needs a job: its number, or its run's folder. `python -m trainkit jobs` lists them.")
    job = _find(places[0])
    if action == "logs":
        _print_log(job, count("lines", given["lines"]) if "lines" in given else None)
    else:
        _cancel(job)


def _list(top: Path, as_json: bool) -> None:
    if not top.is_dir():
        raise ConfigError(f"There is no folder {short(top)}. Give a folder that holds runs: python -m trainkit jobs FOLDER")
    jobs = find_jobs(top.absolute())
    states = states_of(jobs)
    rows = [_facts(job) | dataclasses.asdict(states[job.number]) for job in jobs]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not jobs:
        print(f"No run in or below {short(top)} was submitted as a job. Submit one: python -m trainkit fit ... launcher=slurm")
        return
    table = Table("job", "state", "run", "elapsed", "left", "nodes", "folder")
    for row, job in zip(rows, jobs, strict=True):
        state = f"{row['state']} ({row['reason']})" if row["reason"] else row["state"]
        table.add_row(str(row["job"]), state, row["run"], row["elapsed"], row["time_left"], row["nodes"], short(job.run_dir))
    console_of().print(table)


def _facts(job: Job) -> dict[str, Any]:
    newest = jobs_of(job.run_dir)[-1].number == job.number  # the folder's state is that of its last job
    return {
        "job": job.number,
        "run_dir": str(job.run_dir),
        "run": read_state(job.run_dir).name if newest else "",
        "submitted": job.submitted,
        "log": str(job.log),
    }


def _find(given: str) -> Job:
    if not given.isdecimal():
        if not (jobs := jobs_of(Path(given).absolute())):
            raise ConfigError(f"'{given}' is no number of a job, and no folder of a run that launcher=slurm submitted.")
        return jobs[-1]
    found = [job for job in find_jobs(Path(_RUNS).absolute()) if job.number == int(given)]
    if not found:
        raise ConfigError(
            f"No run below {_RUNS}/ was submitted as job {given}. Give the run's folder, or use scancel and scontrol."
        )
    return found[0]


def _print_log(job: Job, lines: int | None) -> None:
    if not job.log.is_file():
        state = states_of([job])[job.number]
        raise ConfigError(
            f"Job {job.number} has no output yet: it is {state.state}{f' ({state.reason})' if state.reason else ''}; its file "
            f"will be {job.log}."
        )
    with job.log.open(errors="replace") as file:
        sys.stdout.writelines(file if lines is None else deque(file, lines))


def _cancel(job: Job) -> None:
    state = states_of([job])[job.number]
    if state.is_over:
        raise ConfigError(f"Job {job.number} is {state.state} already; there is nothing to cancel.")
    done = run_program("scancel", [str(job.number)])
    if done.returncode:
        raise ConfigError(f"scancel did not end job {job.number}: {error_of(done)}.")
    what = "the ranks save a checkpoint and end" if state.state == "RUNNING" else "it had not started"
    print(f"job {job.number} is cancelled: {what}. To resume: the same command, with run_dir={os.path.relpath(job.run_dir)}")
