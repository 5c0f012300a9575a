"""A trainer's overhead in a step: a tiny MLP, batches in memory, one thread, CPU time of the
process.

    python -m benchmarks.overhead [--short] [--json FILE]

MLP 16-32-4, batch 32, SGD with momentum. The contenders (peers.py) run in one process, in turn; a
figure is the median over rounds of (the step's median, less that of the bare loop in the same
round). Instructions, if valgrind is installed, are exact (instructions.py). "trainkit, torch's
loop" keeps the optimizer as torch makes it on a CPU, a loop over parameters, as all the others do;
"trainkit" takes the fused one (optim/fused.py), its default.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from benchmarks import instructions
from benchmarks.harness import Cell, Findings, Table, Target, main, median, quartiles, take_turns
from benchmarks.peers import (
    LOOPS,
    LOOPS_ALL_ON,
    Clocked,
    Job,
    missing,
    nothing_printed,
    present,
    sgd,
    tiny_batches,
    tiny_mlp,
)

BARE, OURS, ALL_ON = "bare loop", "trainkit", "trainkit, all on"
QUIETEST = "pytorch-ignite"


def seconds_of_steps(
    loop: Callable[[Job], None], steps: int, kind: Callable[[Any], Any] = list, size: int = 32
) -> list[float]:
    """Train and return the CPU seconds of a step, one for each 50 steps,
    without the first of them.
    """
    clock = Clocked()
    with nothing_printed():
        loop(Job(tiny_mlp, sgd, kind(tiny_batches(steps + 1, size)), clock))
    return [(after - before) / clock.every for before, after in pairwise(clock.cpu)][1:]


def measure(short: bool) -> Findings:
    """Let all take turns."""
    torch.set_num_threads(1)
    steps, rounds = (100, 1) if short else (1000, 15)
    loops = present(LOOPS | LOOPS_ALL_ON)
    taken = take_turns(
        {name: lambda loop=loop: seconds_of_steps(loop, steps) for name, loop in loops.items()},
        rounds,
    )
    added = {
        name: [
            1e6 * (statistics.median(seconds) - statistics.median(bare))
            for seconds, bare in zip(samples, taken[BARE], strict=True)
        ]
        for name, samples in taken.items()
    }
    uncounted = instructions.why_not()
    counted = {} if uncounted else instructions.count([BARE, OURS] if short else list(taken))
    rows: list[list[Cell]] = []
    for name, samples in taken.items():
        number = counted.get(name)
        of_bare = None if number is None else number / counted[BARE] - 1
        of_us = 1e6 * median(samples)
        rows.append(
            [
                name,
                of_us,
                statistics.median(added[name]),
                quartiles(added[name]),
                number,
                of_bare and 100 * of_bare,
            ]
        )
    columns = ["", "a step, us", "added, us", "quartiles of rounds", "instructions", "added, %"]
    found = Findings(
        [Table("Step of a tiny MLP: CPU time and instructions", columns, rows)],
        missing=missing() | ({"instructions": uncounted} if uncounted else {}),
        settings={"threads": 1, "batch": 32, "steps": steps, "rounds": rounds},
    )
    ours, all_on = statistics.median(added[OURS]), statistics.median(added[ALL_ON])
    if QUIETEST in added:
        least = statistics.median(added[QUIETEST])
        found.targets.append(
            Target(f"added to a quiet step, against {QUIETEST}", ours, least, "us")
        )
    found.targets.append(Target("added with logging, progress and checkpoints", all_on, 150, "us"))
    return found


if __name__ == "__main__":
    main(measure)
