"""What a trainer adds to a step: a tiny MLP, batches in memory, one thread, CPU time of the process.

    python -m tests.benchmarks.overhead [--short] [--json FILE]

MLP 16-32-4, batch 32, SGD with momentum. The contenders (peers.py) run in one process, in turn; a figure is the median over
rounds of (the step's median, less that of the bare loop in the same round). Instructions, where valgrind is there: two runs of
different length under callgrind, their difference through the difference of their steps, so that starting up drops out.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import torch

from tests.benchmarks.harness import Findings, Table, Target, main, median, take_turns
from tests.benchmarks.peers import (
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


def seconds_of_steps(loop: Callable[[Job], None], steps: int) -> list[float]:
    """Train and return the CPU seconds of a step, one for each 50 steps, without the first of them."""
    clock = Clocked()
    with nothing_printed():
        loop(Job(tiny_mlp, sgd, tiny_batches(steps + 1), clock))
    return [(after - before) / clock.every for before, after in pairwise(clock.cpu)][1:]


def instructions(name: str, steps: tuple[int, int]) -> float:
    """Return the instructions of a step, by callgrind."""
    counted = []
    for number in steps:
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-m", __spec__.name]
        run = subprocess.run([*command, "--once", name, str(number)], check=True, capture_output=True, text=True)
        counted.append(int(re.findall(r"Collected : (\d+)", run.stderr)[-1]))
    return (counted[1] - counted[0]) / (steps[1] - steps[0])


def measure(short: bool) -> Findings:
    """Let all take turns."""
    torch.set_num_threads(1)
    steps, rounds = (100, 1) if short else (1000, 9)
    loops = present(LOOPS | LOOPS_ALL_ON)
    taken = take_turns({name: lambda loop=loop: seconds_of_steps(loop, steps) for name, loop in loops.items()}, rounds)
    base = [statistics.median(seconds) for seconds in taken[BARE]]
    added = {
        name: [1e6 * (statistics.median(seconds) - bare) for seconds, bare in zip(samples, base, strict=True)]
        for name, samples in taken.items()
    }
    rows = [
        [
            name,
            1e6 * median(samples),
            *((None, None) if name == BARE else (statistics.median(added[name]), _spread(added[name]))),
        ]
        for name, samples in taken.items()
    ]
    found = Findings(
        [Table("step of a tiny MLP, us of CPU time", ["", "a step", "added", "rounds' quartiles"], rows)],
        missing=missing(),
        settings={"threads": 1, "batch": 32, "steps": steps, "rounds": rounds},
    )
    ours, all_on = statistics.median(added[OURS]), statistics.median(added[ALL_ON])
    if QUIETEST in added:
        least = statistics.median(added[QUIETEST])
        found.targets.append(Target(f"added to a quiet step, against {QUIETEST}", ours, least, "us"))
    found.targets.append(Target("added with logging, progress and checkpoints", all_on, 150, "us"))
    return found


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.0f} to {high:.0f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        torch.set_num_threads(1)
        seconds_of_steps((LOOPS | LOOPS_ALL_ON)[sys.argv[2]], int(sys.argv[3]))
    else:
        main(measure)
