"""Images per second of conf=resnet50 beside a hand-written Horovod loop, at 1 and 2 ranks, all in one run.

    python tests/benchmarks/throughput.py [--ranks 1 2] [--rounds 3] [--steps 8] [--json FILE]

Three contenders take turns in the same processes, on the same data, batch size and threads:

    hand-written        model, DataLoader, DistributedSampler, SGD, hvd.DistributedOptimizer, a plain loop
    trainkit, alike     conf=resnet50 with channels_last off, since hvd.DistributedOptimizer refuses channels_last
    trainkit            conf=resnet50 as it is shipped

A figure is the median over the steps of all rounds; a first round, and the first two steps of each, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, DistributedSampler

from recipes.digits import Digits
from trainkit.build import build
from trainkit.callback import Callback
from trainkit.config import Job, run

BATCH, WARM = 16, 2


def hand_written(steps: int) -> list[float]:
    """Train by hand and return the seconds of each step."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50(num_classes=10, zero_init_residual=True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.24 * BATCH * hvd.size() / 256, momentum=0.9, nesterov=True, weight_decay=5e-5
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    data = Digits(BATCH)
    data.setup("fit")
    sampler = DistributedSampler(data.train, hvd.size(), hvd.rank(), shuffle=True)
    seconds: list[float] = []
    before = time.perf_counter()
    for images, labels in DataLoader(data.train, BATCH, sampler=sampler):
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
        if len(seconds) == steps:
            break
    return seconds


class StepTimes(Callback):
    """Notes the time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Start the clock."""
        self.before = time.perf_counter()

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Note one."""
        now = time.perf_counter()
        self.seconds.append(now - self.before)
        self.before = now


def trainkit_steps(steps: int, folder: str, *overrides: str) -> list[float]:
    """Train with conf=resnet50 and return the seconds of each step."""
    jobs: list[Job] = []
    run(
        "fit",
        [
            "conf=resnet50",
            f"trainer.max_steps={steps}",
            f"run_dir={folder}",
            f"data.batch_size={BATCH}",
            "trainer.limit_val_batches=0",
            "trainer.enable_checkpointing=false",
            "~callbacks.checkpoint",
            "trainer.enable_model_summary=false",
            "trainer.enable_progress_bar=false",
            *overrides,
        ],
        False,
        jobs.append,
    )
    times = StepTimes()
    built = build(jobs[0].config, [times])
    built.trainer.fit(built.task, datamodule=built.datamodule)
    return times.seconds


def worker(rounds: int, steps: int, out: str) -> None:
    """Let the contenders take turns, and write rank 0's medians."""
    folder = tempfile.mkdtemp()
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))  # the same for all
    contenders: dict[str, Callable[[], list[float]]] = {
        "hand-written": lambda: hand_written(steps),
        "trainkit, alike": lambda: trainkit_steps(steps, folder, "trainer.channels_last=false"),
        "trainkit": lambda: trainkit_steps(steps, folder),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            taken = contender()[WARM:]
            hvd.barrier()
            if turn > 0:  # the first turn warms the allocator and the libraries
                seconds[name] += taken
    if hvd.rank() == 0:
        rates = {name: BATCH * hvd.size() / statistics.median(times) for name, times in seconds.items()}
        Path(out).write_text(json.dumps(rates))


def main() -> None:
    """Start the workers at each size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds, options.steps, options.worker)
        return
    results: dict[str, dict[str, float]] = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/rates.json"
            command = ["-np", str(ranks), sys.executable, __file__, "--worker", out]
            command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            subprocess.run([sys.executable, "-m", "horovod.runner.launch", "--gloo", *command], check=True)
            results[str(ranks)] = json.loads(Path(out).read_text())
    table = Table("images/s", *(f"{ranks} rank{'s' * (ranks != '1')}" for ranks in results))
    first = next(iter(results.values()))
    for name in first:
        base = {ranks: rates["hand-written"] for ranks, rates in results.items()}
        table.add_row(name, *(f"{rates[name]:.1f} ({rates[name] / base[ranks]:.2f})" for ranks, rates in results.items()))
    Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
