"""Cost: what a trainer adds to an import, to a step, to memory, beside a plain loop. Times are those
of a core, which other load on the machine changes little.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import replace

from benchmarks.conformance.cell import Cell, FailsError, clean_environment
from benchmarks.conformance.claims.table import claim
from benchmarks.conformance.work import Fit

STEPS = Fit(rows=4000, batch=4, epochs=1)
IMPORT_LIMIT_S = 1.0
STEP_LIMIT_US = 200.0
MEMORY_LIMIT = 1.1


@claim("cost", own=True)
def import_time(cell: Cell) -> str:
    """Importing it takes at most 1 s of a core more than importing torch."""
    name = cell.module.IMPORT
    program = (
        "import time, torch; start = time.process_time();"
        f" {name}; print(time.process_time() - start)"
    )
    taken = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=clean_environment() | {"KERAS_BACKEND": "torch"},
        )
        taken.append(float(done.stdout.split()[-1]))
    text = f"{min(taken):.2f} s"
    if min(taken) > IMPORT_LIMIT_S:
        raise FailsError(text)
    return text


def step_us(cell: Cell, call: str) -> float:
    """Return the median CPU time of a step, in microseconds."""
    times = cell.fit(STEPS, call=call).first["times"]
    later = zip(times[100:], times[101:], strict=False)
    return 1e6 * statistics.median(after - before for before, after in later)


@claim("cost", own=True)
def step_time(cell: Cell) -> str:
    """A step of a tiny model, with its loader, takes at most 200 us of a core more than in
    a plain loop."""
    pairs = [(step_us(cell, "fit"), step_us(cell, "plain")) for _ in range(3)]  # in turns
    own, plain = (min(times) for times in zip(*pairs, strict=True))
    text = f"{own - plain:+.0f} us on {plain:.0f} us"
    if own - plain > STEP_LIMIT_US:
        raise FailsError(text)
    return text


@claim("cost")
def device_reads(cell: Cell) -> str:
    """A step reads no value off the device (which makes a GPU wait), where nothing is logged by
    the step.
    """
    fit = replace(STEPS, rows=400, count_reads=True)
    reads = cell.fit(fit).first["values"]["reads"]
    text = f"{reads / 100:.2f} reads a step"
    if reads > 10:
        raise FailsError(text)
    return text


def grown_mb(cell: Cell, call: str) -> float:
    """Return the memory that a training needs, the least of three: what a fork copies varies."""
    fit = Fit(rows=32, width=3_000_000, epochs=1)
    return min(float(cell.fit(fit, call=call).first["values"]["grown_mb"]) for _ in range(3))


@claim("cost", own=True)
def memory(cell: Cell) -> str:
    """Training a model of 120 MB needs at most 1.1 times the memory of a plain loop."""
    own, plain = grown_mb(cell, "fit"), grown_mb(cell, "plain")
    text = f"{own:.0f} MB, plain loop {plain:.0f} MB"
    if own > MEMORY_LIMIT * plain:
        raise FailsError(text)
    return text
