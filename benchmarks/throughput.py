"""Samples per second beside loops written by hand with Horovod and with DDP, at 1 and 2 ranks.

    python -m benchmarks.throughput [--short] [--json FILE]

ResNet-50 on digits of 32 x 32 pixels (conf=resnet50, SGD) and a small GPT (conf=gpt, AdamW,
gradients clipped to norm 1), 16 samples a rank. In the processes of one start by horovodrun, and of
one by torchrun, take turns:

    by hand           model, DataLoader, DistributedSampler, hvd.DistributedOptimizer or DistributedDataParallel, a plain loop
    trainkit, alike   the conf with what the loop by hand has: torch's default implementation of the optimizer, and no
                      channels_last, which hvd.DistributedOptimizer refuses
    trainkit          the conf as it is shipped

Each has the cores shared out among the ranks, and its library's own settings: on the CPU trainkit
leaves Horovod's cycle time at 1 ms. Validation, checkpoints and the progress bar are off;
trainkit's learning-rate schedule and loggers, which the loops by hand lack, are on. A figure is the
ratio to the loop by hand of the same round, the median over rounds of medians over steps; the first
three steps of each are left out. Horovod and DDP are not started in one process, since Horovod's
thread works on when it has nothing to sum.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import Cell, Findings, Table, Target, main, median, median_ratio, take_turns
from benchmarks.processes import ROOT, in_turns
from recipes.digits import Digits
from recipes.gpt import GPT, TextBytes
from trainkit.api.callback import Callback
from trainkit.config.compose import ComposedJob, run
from trainkit.config.instantiate import build

BATCH, WARM = 16, 3
Library = Literal["horovod", "ddp"]
BY_HAND, ALIKE, SHIPPED = "by hand", "trainkit, alike", "trainkit"
STARTS: dict[Library, list[str]] = {
    "horovod": ["-m", "horovod.runner.launch", "--gloo", "-np", "{ranks}", sys.executable],
    "ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"],
}


@dataclass(frozen=True)
class Work:
    """A training.

    Attributes:
        conf: trainkit's.
        data: the same, by hand.
        model: the same.
        optimizer: the same, of parameters and the number of ranks.
        loss: of the model and a batch.
        clip: norm that gradients are clipped to.
        alike: overrides that make the conf what the loop by hand is.
    """

    conf: str
    data: Callable[[], Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any, int], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    clip: float | None
    alike: tuple[str, ...]


WORKS = {
    "ResNet-50": Work(
        conf="resnet50",
        data=lambda: Digits(BATCH),
        model=lambda: torchvision.models.resnet50(num_classes=10, zero_init_residual=True),
        optimizer=lambda parameters, ranks: torch.optim.SGD(
            parameters,
            lr=0.24 * BATCH * ranks / 256,
            momentum=0.9,
            nesterov=True,
            weight_decay=5e-5,
        ),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
        clip=None,
        alike=("trainer.channels_last=false", "optimizer.fused=false"),
    ),
    "small GPT": Work(
        conf="gpt",
        data=lambda: TextBytes(batch_size=BATCH),
        model=GPT,
        optimizer=lambda parameters, ranks: torch.optim.AdamW(
            parameters, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1
        ),
        loss=lambda model, batch: cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        ),
        clip=1.0,
        alike=("optimizer.fused=false",),
    ),
}


class Clock:
    """Yields batches and records the seconds between them."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seconds = steps, list[float]()

    def of(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield as many batches as there are steps to be."""
        before = time.perf_counter()
        for batch in loader:
            yield batch
            now = time.perf_counter()
            self.seconds.append(now - before)
            before = now
            if len(self.seconds) == self.steps:
                return


def shard(work: Work, rank: int, ranks: int) -> DataLoader:
    """Return a rank's loader, by hand."""
    data = work.data()
    data.setup("fit")
    return DataLoader(
        data.train, BATCH, sampler=DistributedSampler(data.train, ranks, rank, shuffle=True)
    )


def by_hand_horovod(work: Work, steps: int) -> list[float]:
    """Train as Horovod's documentation does it; return the seconds of each step."""
    import horovod.torch as hvd

    torch.manual_seed(0)
    model, clock = work.model(), Clock(steps)
    optimizer = work.optimizer(model.parameters(), hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for batch in clock.of(shard(work, hvd.rank(), hvd.size())):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        if work.clip is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
    return clock.seconds


def by_hand_ddp(work: Work, steps: int) -> list[float]:
    """Train as torch's documentation does it; return the seconds of each step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, clock = DistributedDataParallel(work.model()), Clock(steps)
    optimizer = work.optimizer(model.parameters(), dist.get_world_size())
    for batch in clock.of(shard(work, dist.get_rank(), dist.get_world_size())):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        if work.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
    return clock.seconds


class StepTimes(Callback):
    """Records the seconds of each step."""

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


def by_trainkit(work: Work, steps: int, overrides: Iterable[str] = ()) -> list[float]:
    """Train with trainkit; return the seconds of each step."""
    jobs: list[ComposedJob] = []
    off = [
        "trainer.limit_val_batches=0",
        "trainer.enable_checkpointing=false",
        "~callbacks.checkpoint",
    ]
    off += ["trainer.enable_model_summary=false", "trainer.enable_progress_bar=false"]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"conf={work.conf}",
            f"trainer.max_steps={steps}",
            f"run_dir={folder}",
            f"data.batch_size={BATCH}",
        ]
        run("fit", [*settings, *off, *overrides], False, jobs.append)
        built = build(jobs[0].config, [times])
        built.trainer.fit(built.task, datamodule=built.datamodule)
    return times.seconds


def worker(library: Library, rounds: int, steps: int, out: Path) -> None:
    """Let the contenders take turns on this rank, work by work;
    rank 0 writes the time of each of its steps.
    """
    if library == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
        local_ranks = hvd.local_size()
        barrier = hvd.barrier
        by_hand = by_hand_horovod
    else:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        local_ranks = dist.get_world_size()
        barrier = dist.barrier
        by_hand = by_hand_ddp
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))  # the same for all

    def all_of(work: Work) -> dict[str, list[list[float]]]:
        contenders = {
            BY_HAND: lambda: by_hand(work, steps)[WARM:],
            ALIKE: lambda: by_trainkit(work, steps, work.alike)[WARM:],
            SHIPPED: lambda: by_trainkit(work, steps)[WARM:],
        }
        return (
            take_turns(contenders, rounds, barrier)
            if rounds
            else in_turns(contenders, 0, at_once=1)
        )

    taken = {name: all_of(work) for name, work in WORKS.items()}
    if rank == 0:
        out.write_text(json.dumps(taken))


def start(
    library: Library, ranks: int, rounds: int, steps: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Start the ranks and return each contender's seconds of each step,
    work by work, round by round.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = ["--worker", library, str(rounds), str(steps), f"{folder}/out.json"]
        line = [
            sys.executable,
            *(part.format(ranks=ranks) for part in STARTS[library]),
            str(Path(__file__)),
            *own,
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            line, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(line)} ended with"
                f" {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        taken: dict[str, dict[str, list[list[float]]]] = json.loads(
            Path(folder, "out.json").read_text()
        )
        return taken


def rows_of(taken: dict[str, list[list[float]]], library: str, ranks: int) -> list[list[Cell]]:
    """Return the table's rows: samples a second, and how many times those of the loop by hand."""
    rows: list[list[Cell]] = []
    for name, own in taken.items():
        ratios = [
            statistics.median(b) / statistics.median(a)
            for a, b in zip(own, taken[BY_HAND], strict=True)
        ]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append(
            [name, library, ranks, BATCH * ranks / median(own), statistics.median(ratios), spread]
        )
    return rows


def measure(short: bool) -> Findings:
    """Measure both works, at both numbers of ranks, with both libraries."""
    # two ranks share caches and memory
    rounds, steps = ({1: 0, 2: 0}, WARM + 1) if short else ({1: 4, 2: 9}, WARM + 8)
    columns = ["", "library", "ranks", "samples/s", "of by hand", "rounds"]
    counts = "/".join(map(str, rounds.values()))
    findings = Findings(
        settings={
            "batch a rank": BATCH,
            "rounds at 1/2 ranks": counts,
            "steps": steps - WARM,
            "threads": "cores / ranks",
        }
    )
    libraries: list[Library] = ["horovod", "ddp"]
    findings.tables = [Table(f"{name}, training", columns, []) for name in WORKS]
    for ranks in [2] if short else [1, 2]:
        for library in libraries:
            taken = start(library, ranks, rounds[ranks], steps)
            for table, name in zip(findings.tables, WORKS, strict=True):
                table.rows += rows_of(taken[name], library, ranks)
            if library == "horovod" and ranks == 2:
                resnet = taken["ResNet-50"]
                what = "ResNet-50 at 2 ranks, of the loop by hand with Horovod"
                alike, shipped = (
                    1 / median_ratio(resnet[which], resnet[BY_HAND]) for which in (ALIKE, SHIPPED)
                )
                findings.targets.append(
                    Target(f"{what}: {ALIKE}", alike, 0.99, "times", "at least")
                )
                findings.targets.append(
                    Target(f"{what}: as it is shipped", shipped, 1.0, "times", "at least")
                )
    return findings


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))  # type: ignore[arg-type]
    else:
        main(measure)
