"""jobs: the jobs on Slurm, Kubernetes and Ray;
`jobs logs` prints the output of one, `jobs cancel` ends one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from trainkit.cli.guard import main_alone
from trainkit.cli.options import count, read_keys
from trainkit.cli.usage import help_text
from trainkit.console import console_of, short
from trainkit.errors import ConfigError
from trainkit.extension import extensions, resolve
from trainkit.extensions.jobs.usage import USAGE
from trainkit.launch.jobs import Cluster, JobRow
from trainkit.run.state import read_state

_RUNS = "runs"


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    only_prints = "cancel" not in arguments[:1]
    return main_alone(arguments, help_text(command, USAGE), lambda: _work(arguments), only_prints)


def _work(arguments: Sequence[str]) -> None:
    action = arguments[0] if arguments and arguments[0] in ("logs", "cancel") else "list"
    rest = [argument for argument in arguments[action != "list" :] if argument != "--json"]
    keys = USAGE.keys() if action == "logs" else {}
    places = [argument for argument in rest if "=" not in argument or Path(argument).is_dir()]
    given = read_keys([argument for argument in rest if argument not in places], keys, "jobs")
    if len(places) > 1:
        raise ConfigError(
            f"'{places[1]}' is one too many: jobs takes one folder, or logs or cancel and one job."
        )
    if action == "list":
        _list(places[0] if places else None, as_json="--json" in arguments)
        return
    if not places:
        raise ConfigError(
            f"jobs {action} needs a job: its number or name, or its run's folder. `python -m"
            " trainkit jobs` lists them."
        )
    (job,) = places
    cluster = _cluster_of(job)
    if action == "logs":
        cluster.print_log(job, count("lines", given["lines"]) if "lines" in given else None)
    else:
        print(cluster.cancel(job))


def _clusters() -> list[Cluster]:
    """Return the clusters that extensions bring; Ray's is the last, since it takes any name."""
    return [resolve(cluster)() for extension in extensions() for cluster in extension.clusters]


def _cluster_of(job: str) -> Cluster:
    for cluster in _clusters():
        if cluster.has(job):
            return cluster
    raise ConfigError(
        f"'{job}' is no number of a job, no folder of a run that launcher=slurm submitted, and no"
        " job of launcher=kubernetes whose manifest is here (kubernetes/NAME.yaml). Jobs of Ray"
        " are known where RAY_ADDRESS or RAY_API_SERVER_ADDRESS is set."
    )


def _list(folder: str | None, as_json: bool) -> None:
    top = Path(folder or _RUNS)
    if folder is not None and not top.is_dir():
        raise ConfigError(
            f"There is no folder {short(top)}. Give a folder that holds runs: python -m trainkit"
            " jobs FOLDER"
        )
    rows: dict[str, list[JobRow]] = {}
    errors: dict[str, ConfigError] = {}  # of clusters that have jobs of ours, and do not answer
    for cluster in _clusters():
        try:
            rows[cluster.name] = cluster.rows(top)
        except ConfigError as error:
            errors[cluster.name] = error
    rows = {name: of_one for name, of_one in rows.items() if of_one}
    if errors and not rows:
        raise next(iter(errors.values()))
    if as_json:
        print(
            json.dumps(
                [_facts(name, row, of_one) for name, of_one in rows.items() for row in of_one],
                indent=1,
            )
        )
    elif rows:
        _print_table(rows)
    else:
        print(
            f"No run in or below {short(top)} was submitted as a job. Submit one: python -m"
            " trainkit fit ... launcher=slurm (or kubernetes). Those of `ray job submit` are"
            " listed where RAY_API_SERVER_ADDRESS is set."
        )
    for name, why in errors.items():
        print(f"[jobs] {name}: {why}", file=sys.stderr)


def _print_table(rows: dict[str, list[JobRow]]) -> None:
    table = Table(
        "on", "job", "state", "run", "elapsed", "left", "nodes", "folder, manifest or command"
    )
    for name, of_one in rows.items():
        for row in of_one:
            state = f"{row.state} ({row.reason})" if row.reason else row.state
            times = (row.elapsed, row.time_left)
            table.add_row(
                name, row.job, state, _run_state(row, of_one), *times, row.nodes, row.where
            )
    console_of().print(table)


def _facts(name: str, row: JobRow, of_one: Sequence[JobRow]) -> dict[str, Any]:
    facts: dict[str, Any] = dataclasses.asdict(row)
    facts |= {
        "cluster": name,
        "run": _run_state(row, of_one),
        "run_dir": str(row.run_dir) if row.run_dir else None,
    }
    del facts["more"]
    facts.update(row.more)
    return facts


def _run_state(row: JobRow, of_one: Sequence[JobRow]) -> str:
    """Return how a run has ended; its folder says it of the newest of its jobs."""
    newest = [other for other in of_one if other.run_dir == row.run_dir][-1]
    return read_state(row.run_dir).name if row.run_dir and newest == row else ""
