"""The gpt recipe on a slow link between two hosts: exact sums beside PowerSGD, local SGD and
DiLoCo.

    python -m benchmarks.slow_link [--short] [--json FILE]

Two ranks of ddp, each alone on its host (benchmarks/links.py), train conf=gpt with microbatches of
2 windows: as on a device that is fast for its link, a step computes for less time than its
gradients travel. Seconds are of training alone, between barriers: validations are left out, the
outer steps that they force are not. Bytes are the link's counters. One seed.

Beside the equal steps, plain training has as many steps as fit into the time, and into the bytes,
of the fastest setting that reaches its loss; each of these runs has its own warm-up and cosine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.communication import environment, wait_for
from benchmarks.harness import Cell, Findings, Table, Target, main
from benchmarks.links import ROOT, Link, unavailable
from trainkit.extensions.programs.commands import ended_by_signals

RATE_MBIT, DELAY_MS = 100.0, 10.0
STEPS, MORE = 300, 360
Setting = tuple[str, dict[str, Any], int]
PLAIN: Setting = ("exact", {}, STEPS)
SETTINGS: list[Setting] = [
    PLAIN,
    ("powersgd", {"rank": 8}, STEPS),
    ("powersgd", {"rank": 8}, MORE),
    ("local_sgd", {"every_n_steps": 10}, STEPS),
    ("local_sgd", {"every_n_steps": 10}, MORE),
    ("diloco", {"every_n_steps": 10, "outer_lr": 0.9, "outer_momentum": 0.2, "fragments": 2}, MORE),
]


def train(link: Link, settings: list[Setting], timeout_s: float) -> list[dict[str, Any]]:
    """Train under each setting in one start of two ranks; return what rank 0 noted."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        # the text, in the form of this moment
        shutil.copytree(ROOT / "trainkit", Path(folder, "text"))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in (0, 1):
            command = [
                *link.inside(rank),
                sys.executable,
                "-m",
                "benchmarks.slow_rank",
                folder,
                json.dumps(settings),
            ]
            env = (
                os.environ
                | environment("ddp", rank, link, secrets.token_hex(32))
                | {"OMP_NUM_THREADS": "1"}
            )
            ranks.append(started.enter_context(subprocess.Popen(command, cwd=ROOT, env=env)))
            started.callback(ranks[-1].kill)
        wait_for(ranks, timeout_s)
        return list(json.loads(Path(folder, "result.json").read_text()))


def name_of(kind: str, arguments: dict[str, Any]) -> str:
    """Return a setting as on the command line."""
    return " ".join([kind, *(f"{key}={value:g}" for key, value in arguments.items())])


def rows_of(
    runs: list[dict[str, Any]], plain: dict[str, float], note: str = ""
) -> list[list[Cell]]:
    """Return a row of the table for each setting."""
    rows: list[list[Cell]] = []
    for run in runs:
        end = run["noted"][-1]
        shares = [end["seconds"] / plain["seconds"], end["bytes"] / plain["bytes"]]
        cells: list[Cell] = [
            end["step"],
            round(end["loss"], 4),
            end["seconds"],
            shares[0],
            end["bytes"] / 1e6,
            shares[1],
        ]
        rows.append([name_of(run["kind"], run["arguments"]) + note, *cells])
    return rows


def measure(short: bool) -> Findings:
    """Train under each setting, then exactly in equal time and bytes."""
    settings: dict[str, Cell] = {
        "ranks": 2,
        "batch_size": 2,
        "context": 128,
        "threads of a rank": 1,
        "seed": 0,
    }
    if why := unavailable():
        return Findings(missing={"all": why}, settings=settings)
    chosen = [(kind, arguments, 12) for kind, arguments, _ in SETTINGS[:3]] if short else SETTINGS
    columns = [
        "communication",
        "steps",
        "val/loss",
        "s",
        "of exact's",
        "MB over the link",
        "of exact's ",
    ]
    curves: list[list[Cell]] = []
    with ended_by_signals(), Link(RATE_MBIT, DELAY_MS) as link:
        round_trip_ms, mbit = link.checked()
        settings |= {"Mbit/s seen": round(mbit, 1), "round trip seen, ms": round(round_trip_ms, 1)}
        runs = train(link, chosen, 3000)
        plain, others = runs[0]["noted"][-1], [run["noted"][-1] for run in runs[1:]]
        as_good = [end for end in others if end["loss"] <= plain["loss"]] or others
        best = min(as_good, key=lambda end: end["seconds"])
        equal = [round(plain["step"] * best[what] / plain[what]) for what in ("seconds", "bytes")]
        again = train(link, [("exact", {}, max(4, steps)) for steps in equal], 3000)
    rows = rows_of(runs, plain)
    for run, note in zip(again, (", equal time", ", equal bytes"), strict=True):
        rows += rows_of([run], plain, note)
    for run in [*runs, *again]:
        curves += [
            [name_of(run["kind"], run["arguments"]), n["step"], n["seconds"], n["loss"]]
            for n in run["noted"]
        ]
    title = f"conf=gpt on a link of {RATE_MBIT:g} Mbit/s, {DELAY_MS:g} ms"
    tables = [
        Table(title, columns, rows),
        Table("Its curves", ["communication", "step", "s", "val/loss"], curves),
    ]
    reached = best["loss"] <= plain["loss"]
    what = (
        "time to exact training's loss, of its time"
        if reached
        else "time of a run that did NOT reach exact training's loss"
    )
    return Findings(
        tables, [Target(what, best["seconds"] / plain["seconds"], 0.5, "times")], settings=settings
    )


if __name__ == "__main__":
    main(measure)
