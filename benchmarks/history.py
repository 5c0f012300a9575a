"""The history of figures: each run of a benchmark adds a line, and a page draws them.

    python -m benchmarks.history [--html FILE] [--check]

`python -m benchmarks.everything` appends to history.jsonl: benchmark, day, commit, machine, torch,
and the figures that have a target, with the instructions that trainkit adds to a step (exact on any
machine, for one version of torch). README.md beside it has a row for each figure (`python -m
benchmarks.page`), --html a chart of each. --check counts instructions again, and fails if they are
a tenth more than in the last run with this torch: who accepts that records a run, and it is seen.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from benchmarks import instructions
from benchmarks.harness import shown
from trainkit.extensions.reports.colors import BLUE
from trainkit.extensions.reports.page import Section, figure, write_page

HISTORY = Path(__file__).with_name("history.jsonl")
BARE, GUARDED = "bare loop", ("trainkit", "trainkit, all on")
MORE = 0.1  # of the instructions that were added in the last run
NOISE = 6000  # by which counts of one commit differ, where addresses do (in 940,000 of a step)
COUNTS = 3  # at most, until one is below the limits
Line = dict[str, Any]


def instructions_of(findings: Mapping[str, Any]) -> dict[str, float]:
    """Return the instructions that trainkit adds to a step, of the overhead's findings."""
    counted = {
        row[0]: row[findings["tables"][0]["columns"].index("instructions")]
        for row in findings["tables"][0]["rows"]
    }
    if counted.get(BARE) is None:
        return {}
    return {
        title(name): counted[name] - counted[BARE]
        for name in GUARDED
        if counted.get(name) is not None
    }


def title(name: str) -> str:
    """Return the figure's name of a contender's instructions."""
    return f"instructions added to a step: {name}"


def line_of(name: str, findings: Mapping[str, Any], machine: Line, commit: str, day: str) -> Line:
    """Return what a run adds to the history."""
    figures = {target["what"]: target["measured"] for target in findings["targets"]}
    if name == "overhead":
        figures |= instructions_of(findings)
    where = f"{machine['cores']} cores of an {machine['processor']}"
    return {
        "benchmark": name,
        "date": day,
        "commit": commit,
        "machine": where,
        "torch": machine["torch"],
        "figures": figures,
    }


def append(name: str, findings: Mapping[str, Any], machine: Line) -> None:
    """Add a run of today to the file."""
    line = line_of(name, findings, machine, present_commit(), date.today().isoformat())
    with HISTORY.open("a") as file:
        file.write(json.dumps(line) + "\n")


def present_commit() -> str:
    """Return the commit that is checked out, with "+" if files differ; "" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def load() -> list[Line]:
    """Return all lines, the oldest first."""
    return [json.loads(line) for line in HISTORY.read_text().splitlines()]


def by_figure(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """Return the runs of each (benchmark, figure) that has several."""
    runs: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        for what in line["figures"]:
            runs.setdefault((line["benchmark"], what), []).append(line)
    return {key: value for key, value in runs.items() if len(value) > 1}


def table(lines: Sequence[Line]) -> str:
    """Return README's table: the first, least, largest and last value of each figure."""
    rows = ["| | first | lowest | highest | last | runs |", "| --- | --: | --: | --: | --: | --: |"]
    for (name, what), runs in by_figure(lines).items():
        values = [run["figures"][what] for run in runs]
        cells = [values[0], min(values), max(values), values[-1]]
        dated = f"{shown(cells[3])} ({runs[-1]['date']})"
        rows.append(
            f"| {name}: {what} | {' | '.join(map(shown, cells[:3]))} | {dated} | {len(runs)} |"
        )
    return "\n".join(rows)


def write_html(lines: Sequence[Line], path: Path) -> None:
    """Write the page: a chart a figure."""
    parts = []
    for number, ((name, what), runs) in enumerate(by_figure(lines).items()):
        chart = figure("run", what, height=260)
        where = [f"{run['date']}, {run['commit']}, {run['machine']}" for run in runs]
        chart.add_trace(
            go.Scatter(
                x=list(range(1, len(runs) + 1)),
                y=[run["figures"][what] for run in runs],
                text=where,
                mode="lines+markers",
                line={"color": BLUE},
            )
        )
        chart.update_xaxes(dtick=1)
        parts.append(Section(f"{name}: {what}", chart=chart, id=f"figure-{number}"))
    days = sorted(line["date"] for line in lines)
    under = (
        f"{len(lines)} runs of benchmarks, {days[0]} to {days[-1]}; machines differ: see a point"
    )
    write_page(path, "History of figures", under, [("figures", str(len(parts)))], parts)


def limits(lines: Sequence[Line], torch_version: str) -> dict[str, float]:
    """Return the most instructions that each guarded contender may add, for a version of torch."""
    latest: dict[str, float] = {}
    for line in lines:
        if line["torch"] == torch_version:
            latest |= {
                name: line["figures"][title(name)]
                for name in GUARDED
                if title(name) in line["figures"]
            }
    return {name: value * (1 + MORE) + NOISE for name, value in latest.items()}


def check(torch_version: str) -> list[str]:
    """Count again, and return what costs more than it may, in the least of some counts: two of one
    commit differ by up to a tenth, as dicts and addresses do.

    Raises:
        LookupError: no run with this torch was recorded.
    """
    allowed = limits(load(), torch_version)
    if not allowed:
        raise LookupError(
            f"history.jsonl has no instructions with torch {torch_version}: run python -m"
            " benchmarks.everything --only overhead, where valgrind is installed."
        )
    added = dict.fromkeys(allowed, math.inf)
    for seed in range(COUNTS):
        counted = instructions.count([BARE, *allowed], seed)
        added = {name: min(least, counted[name] - counted[BARE]) for name, least in added.items()}
        if all(added[name] <= most for name, most in allowed.items()):
            break
    return [
        f"{name} adds {number:,.0f} instructions to a step; at most {allowed[name]:,.0f}"
        for name, number in added.items()
        if number > allowed[name]
    ]


def main() -> None:
    """Draw the page, or check the instructions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history")
    parser.add_argument("--html", type=Path, default=Path("build/history.html"))
    parser.add_argument("--check", action="store_true", help="count instructions again")
    options = parser.parse_args()
    if options.check:
        import torch

        if wrong := check(torch.__version__.partition("+")[0]):
            sys.exit("\n".join(wrong))
        return
    write_html(load(), options.html)
    print(options.html)


if __name__ == "__main__":
    main()
