"""A trainer's overhead in a step, on the kinds of data that people have: CPU time and instructions over the bare loop's.

    python -m benchmarks.kinds [--short] [--json FILE]

The tiny MLP of overhead.py in batches of 16, the same batches each time, read in the training process (`num_workers=0`). A
figure is the median over rounds of (the step's median, less that of the bare loop on the same data in the same round). Each
sample of a Dataset of one's own has random numbers of its own in trainkit: that is in the figures.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks import instructions
from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.overhead import BARE, OURS, QUIETEST, seconds_of_steps
from benchmarks.peers import KINDS, LOOPS, missing, present

BATCH = 16
CONTENDERS = [BARE, OURS, QUIETEST, "Fabric", "Accelerate", "Lightning"]


def measure(short: bool) -> Findings:
    """Let all take turns on each kind of data."""
    torch.set_num_threads(1)
    steps, rounds = (100, 1) if short else (500, 9)
    loops = present({name: LOOPS[name] for name in CONTENDERS})
    kinds = list(KINDS)[:2] if short else list(KINDS)
    uncounted = instructions.why_not()
    counted_names = [] if uncounted else [name for name in (BARE, OURS, QUIETEST) if name in loops]
    counted = (
        instructions.count([f"{name} on {kind}" for kind in kinds for name in counted_names], BATCH) if counted_names else {}
    )
    rows: list[list[Cell]] = []
    found = Findings([], missing=missing(), settings={"threads": 1, "batch": BATCH, "steps": steps, "rounds": rounds})
    for kind in kinds:
        works = {name: partial(seconds_of_steps, loop, steps, KINDS[kind], BATCH) for name, loop in loops.items()}
        taken = take_turns(works, rounds)
        added = {
            name: statistics.median(
                1e6 * (statistics.median(seconds) - statistics.median(bare))
                for seconds, bare in zip(samples, taken[BARE], strict=True)
            )
            for name, samples in taken.items()
        }
        bare_us = 1e6 * statistics.median(statistics.median(seconds) for seconds in taken[BARE])
        base = counted.get(f"{BARE} on {kind}")
        more: list[Cell] = [
            None if base is None or (number := counted.get(f"{name} on {kind}")) is None else number - base
            for name in (OURS, QUIETEST)
        ]
        rows.append([kind, bare_us, *(added.get(name) for name in CONTENDERS[1:]), *more])
        if QUIETEST in added:
            found.targets.append(Target(f"added on {kind}, against {QUIETEST}", added[OURS], added[QUIETEST], "us"))
    columns = ["", "bare loop, us", *(f"{name} adds, us" for name in CONTENDERS[1:])]
    columns += [f"{name} adds, instructions" for name in (OURS, QUIETEST)]
    found.tables.append(
        Table("Step of a tiny MLP on kinds of data: CPU time and instructions over the bare loop", columns, rows)
    )
    return found


if __name__ == "__main__":
    main(measure)
