"""How the cost of a step grows: with parameter tensors, callbacks, logged values, samples of the
data set, and ranks.

    python -m benchmarks.growth [--short] [--json FILE]

Steps       one process, one thread, batches in memory, plain SGD; quiet (no logger, bar, checkpoint). A bare loop and
            trainkit take turns; the figure is trainkit's step less the bare one of the same round,
            in microseconds, and how much of it one more tensor (callback, logged value) makes. A
            sample is the mean of a block of steps with one log in it, so costs once a log count.
Samples     each number in a process of its own: RankSampler over a shuffled epoch, as a loader's, beside torch's
            DistributedSampler. Time to the first index, time of each further one, and what the peak
            of the process's memory grew by.
Ranks       the plan's arithmetic for one step of one rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import trainkit
from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.processes import answer, environment
from trainkit.api.callback import Callback
from trainkit.data.loader import RankSampler
from trainkit.data.order import epoch_order
from trainkit.data.plan import StepPlan

TENSORS, CALLBACKS, VALUES = (10, 100, 1_000, 10_000), (0, 10, 50), (0, 10, 100)
RANKS = (1, 8, 64, 512, 4096)
BATCH = 32


@dataclass(frozen=True)
class Case:
    """A case to measure against the bare loop.

    Attributes:
        tensors: parameter tensors of the model.
        callbacks: how many callbacks there are.
        idle: whether they override nothing, in place of `on_train_batch_end`.
        values: values that `training_step` logs.
    """

    tensors: int = 10
    callbacks: int = 0
    idle: bool = False
    values: int = 0


class Many(trainkit.Task):
    """Tiny parameter tensors; their sum scales the input.
    Records the start of each forward pass.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(case.tensors)])
        self.names = [f"train/value_{i}" for i in range(case.values)]
        self.begins: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss; the bare loop calls it too."""
        self.begins.append(time.perf_counter())
        return (batch * torch.cat(tuple(self.weights)).sum()).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and log it `values` times."""
        loss = self.loss(batch)
        for name in self.names:
            self.log(name, loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Busy(Callback):
    """Overrides one hook of a batch, and does next to nothing in it."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count."""
        self.batches += 1


class Idle(Callback):
    """Overrides nothing."""


def batches(steps: int) -> list[Tensor]:
    """Return one batch, repeated."""
    return [torch.ones(BATCH, 8)] * steps


def in_blocks(begins: Sequence[float], block: int) -> list[float]:
    """Return the mean seconds of a step in each block but the first."""
    edges = begins[block::block]
    return [(after - before) / block for before, after in zip(edges, edges[1:], strict=False)]


def bare(case: Case, block: int, blocks: int) -> list[float]:
    """Train by hand."""
    task = Many(case)
    optimizer = task.configure_optimizers()
    for batch in batches(block * (blocks + 1) + 1):
        task.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return in_blocks(task.begins, block)


def with_trainkit(case: Case, block: int, blocks: int) -> list[float]:
    """Train the same with trainkit."""
    task, steps = Many(case), block * (blocks + 1) + 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainkit.Trainer(
            max_epochs=1,
            callbacks=[Idle() if case.idle else Busy() for _ in range(case.callbacks)],
            log_every_n_steps=block,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            run_dir=folder,
        )
        trainer.fit(task, batches(steps))
    assert len(task.begins) == steps
    return in_blocks(task.begins, block)


def overhead(case: Case, short: bool) -> tuple[float, float]:
    """Return microseconds of (a bare step, trainkit's addition to it)."""
    rounds = 1 if short else 7
    blocks, block = (1, 2) if short else (2, 10) if case.tensors >= 1_000 else (4, 100)
    samples = take_turns(
        {
            "bare": partial(bare, case, block, blocks),
            "ours": partial(with_trainkit, case, block, blocks),
        },
        rounds,
    )
    medians = {
        name: [1e6 * statistics.median(taken) for taken in taken_by]
        for name, taken_by in samples.items()
    }
    added = statistics.median(
        ours - own for ours, own in zip(medians["ours"], medians["bare"], strict=True)
    )
    return statistics.median(medians["bare"]), added


def growth_table(title: str, of: str, cases: dict[str, tuple[int, Case]], short: bool) -> Table:
    """Measure cases; the first is the base of the others."""
    rows: list[list[Cell]] = []
    start: tuple[int, float] | None = None
    for name, (number, case) in cases.items():
        base, added = overhead(case, short)
        start = start or (number, added)
        each = None if number == start[0] else (added - start[1]) / (number - start[0])
        rows.append([name, base, added, each])
    return Table(title, [of, "bare step", "trainkit adds", f"for each of the {of}"], rows)


def status_mb(field: str) -> float:
    """Return a size of this process in MB:
    "VmRSS", or "VmHWM" for its peak (getrusage's would be the parent's too).
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def ours_indices(num_samples: int) -> Iterator[int]:
    """Yield rank 0's of 2."""
    plan = StepPlan(num_samples, BATCH, 2)
    sampler = RankSampler(plan, 0, lambda epoch: epoch_order(num_samples, True, 0, epoch, None))
    return (index for microbatch in sampler for _, index in microbatch)


def torch_indices(num_samples: int) -> Iterator[int]:
    """Yield rank 0's of 2."""
    return iter(DistributedSampler(range(num_samples), 2, 0, shuffle=True))  # type: ignore[arg-type]


SAMPLERS: dict[str, Callable[[int], Iterator[int]]] = {
    "trainkit": ours_indices,
    "torch's DistributedSampler": torch_indices,
}


def walk(sampler: str, num_samples: int, out: str) -> None:
    """Draw indices in a process of its own, and write its time and memory."""
    torch.set_num_threads(1)
    next(SAMPLERS[sampler](1_000))  # exclude imports of a first call
    before, begin = status_mb("VmRSS"), time.perf_counter()
    indices = SAMPLERS[sampler](num_samples)
    next(indices)
    first, further = time.perf_counter(), 0
    for _ in zip(indices, range(min(num_samples // 2 - 1, 400_000)), strict=False):
        further += 1
    end = time.perf_counter()
    figures = {
        "first_ms": 1e3 * (first - begin),
        "each_us": 1e6 * (end - first) / further,
        "MB": status_mb("VmHWM") - before,
    }
    Path(out).write_text(json.dumps(figures))


def samples_table(short: bool) -> tuple[Table, list[Target]]:
    """Walk data sets of growing size."""
    sizes = [10**4] if short else [10**exponent for exponent in range(3, 9)]
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for size in sizes:
        for sampler in SAMPLERS:
            figures = answer("benchmarks.growth", "walk", sampler, str(size), env=environment())
            rows.append(
                [
                    f"{size:,} samples, {sampler}",
                    figures["first_ms"],
                    figures["each_us"],
                    figures["MB"],
                ]
            )
            if sampler == "trainkit" and size == 10**8:
                targets += [
                    Target("sampler over 1e8 samples, memory", figures["MB"], 1000, "MB"),
                    Target(
                        "sampler over 1e8 samples, first index", figures["first_ms"] / 1000, 1, "s"
                    ),
                ]
    return (
        Table(
            "Sampler, shuffled",
            ["samples", "first index, ms", "each further, us", "memory's peak grew, MB"],
            rows,
        ),
        targets,
    )


def ranks_table(short: bool) -> Table:
    """Time the plan's arithmetic."""
    rows: list[list[Cell]] = []
    for ranks in RANKS:
        plan = StepPlan(10**8 + 1, BATCH, ranks, accumulate=4)
        steps = range(0, plan.num_steps, max(1, plan.num_steps // (10 if short else 2_000)))
        took: list[float] = []
        for _ in range(2 if short else 5):
            begin = time.perf_counter()
            for step in [*steps, plan.num_steps - 1]:
                plan.microbatches(step, ranks - 1)
            took.append(1e6 * (time.perf_counter() - begin) / (len(steps) + 1))
        rows.append([ranks, statistics.median(took)])
    return Table("Plan of one rank's step (4 microbatches), us", ["ranks", "us"], rows)


def measure(short: bool) -> Findings:
    """Measure all."""
    torch.set_num_threads(1)
    tensors = {f"{n:,}": (n, Case(tensors=n)) for n in TENSORS}
    callbacks = {f"{n}": (n, Case(callbacks=n)) for n in CALLBACKS} | {
        "50 that override nothing": (50, Case(callbacks=50, idle=True))
    }
    values = {f"{n}": (n, Case(values=n)) for n in VALUES}
    tables = [
        growth_table("A step by its parameter tensors, us", "tensors", tensors, short),
        growth_table("A step by its callbacks, us", "callbacks", callbacks, short),
        growth_table("A step by the values it logs, us", "values", values, short),
    ]
    samples, targets = samples_table(short)
    settings: dict[str, Cell] = {"threads": 1, "batch_size": BATCH, "ranks of the samplers": 2}
    return Findings([*tables, samples, ranks_table(short)], targets, {}, settings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["walk"]:
        walk(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(measure)
