"""A trainer's overhead in a step, on the kinds of data that people have: CPU time over the bare
loop's.

    python -m benchmarks.kinds [--short] [--json FILE]

The tiny MLP of overhead.py in batches of 16, the same batches each time, read in the training
process (`num_workers=0`). The contenders take turns on one kind of data after the other; a figure
is the median over rounds of (the step's median, less that of the bare loop on the same data in the
same round).
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.overhead import BARE, OURS, QUIETEST, seconds_of_steps
from benchmarks.peers import KINDS, LOOPS, missing, present

BATCH = 16
CONTENDERS = [BARE, OURS, QUIETEST, "Fabric", "Accelerate", "Lightning"]


def measure(short: bool) -> Findings:
    """Let all take turns on each kind of data."""
    torch.set_num_threads(1)
    # short turns: the machine's speed changes within seconds
    steps, rounds = (100, 1) if short else (200, 45)
    loops = present({name: LOOPS[name] for name in CONTENDERS})
    rows: list[list[Cell]] = []
    settings = {"threads": 1, "batch": BATCH, "steps": steps, "rounds": rounds}
    found = Findings([], missing=missing(), settings=settings)
    for kind, make in KINDS.items():
        taken = take_turns(
            {
                name: partial(seconds_of_steps, loop, steps, make, BATCH)
                for name, loop in loops.items()
            },
            rounds,
        )
        added = {
            name: statistics.median(
                1e6 * (statistics.median(seconds) - statistics.median(bare))
                for seconds, bare in zip(samples, taken[BARE], strict=True)
            )
            for name, samples in taken.items()
        }
        bare_us = 1e6 * statistics.median(statistics.median(seconds) for seconds in taken[BARE])
        rows.append([kind, bare_us, *(added.get(name) for name in CONTENDERS[1:])])
        if QUIETEST in added:
            found.targets.append(
                Target(f"added on {kind}, against {QUIETEST}", added[OURS], added[QUIETEST], "us")
            )
    columns = ["", "bare loop, us", *(f"{name} adds, us" for name in CONTENDERS[1:])]
    found.tables.append(
        Table("Step of a tiny MLP on kinds of data: CPU time over the bare loop", columns, rows)
    )
    return found


if __name__ == "__main__":
    main(measure)
