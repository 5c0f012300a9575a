"""The cost of `callbacks=elastic` with a commit after each step, beside Horovod's own commit and a
bare copy.

    python -m benchmarks.elastic [--short] [--json FILE]

Two ranks on one host, elastic, one thread each, Adam; a small model (the commit is all messages),
and one of 25.6 million parameters, 307 MB with Adam's state (the commit is all copying). In one
training kinds of blocks of steps take turns:

    none        steps, and no commit
    elastic     trainkit.Elastic commits after each
    horovod     hvd.elastic.TorchState of model and optimizer commits after each
    copy        the same tensors are copied, into allocated memory
    cycle       one number is summed over ranks, which takes a cycle of Horovod's thread

Each is timed by itself: the median of the calls on rank 0, the wait for a slower rank included. The
target, of these: a commit takes at most two cycles and one copy. What each adds to a step is more,
since it leaves the caches full of other things, and less, since ranks that have waited for each
other need not soon again; it is the median over rounds of a step of such a block, which begins and
ends with the ranks together, less one of the round's block without.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from benchmarks.harness import Cell, Findings, Table, Target, main
from benchmarks.processes import environment
from trainkit.api.callback import Callback

NAMES = {
    "elastic": "trainkit's commit",
    "horovod": "Horovod's commit",
    "copy": "one copy",
    "cycle": "one cycle",
}
KINDS = ("none", *NAMES)
MODELS = {"small": (64, 64), "large": (4000, 6300)}  # widths of the two hidden layers
NEVER, BLOCK, BATCH, INPUTS = 10**9, 5, 2, 64


class Perceptron(trainkit.Task):
    """Three layers."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        sizes = [(INPUTS, first), (first, second), (second, 1)]
        self.layers = nn.Sequential(
            *(layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU()))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and log it: a mean over the epoch is part of each rank's state."""
        loss = self.layers(batch[0]).square().mean()
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Timed(trainkit.Elastic):
    """Records the time of each commit, in ms."""

    def __init__(self) -> None:
        super().__init__(commit_every_n_steps=NEVER)
        self.commits: list[float] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Commit if one is due."""
        begin = time.perf_counter()
        super().on_train_step_end(trainer, task)
        if self.commit_every_n_steps == 1:
            self.commits.append(1000 * (time.perf_counter() - begin))


class Kinds(Callback):
    """Lets kinds of blocks take turns and records the time of a step of each, in ms;
    comes after Elastic.
    """

    runs_last = True

    def __init__(self, elastic: Timed) -> None:
        self.elastic = elastic
        self.steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.alone: dict[str, list[float]] = {"horovod": [], "copy": [], "cycle": []}
        self.held: list[Tensor] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Begin."""
        self.optimizer = trainer.optimizers[0]
        self.stock = hvd.elastic.TorchState(model=task.layers, optimizer=self.optimizer, batch=0)
        self.before = time.perf_counter()

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Do this block's work; at its end record it, and set up the next."""
        done, begin = divmod(trainer.global_step, BLOCK), time.perf_counter()
        kind = KINDS[(trainer.global_step - 1) // BLOCK % len(KINDS)]
        if kind == "horovod":
            self.stock.commit()
        elif kind == "copy":
            self.copy(task)
        elif kind == "cycle":
            hvd.allreduce(torch.zeros(1), name="cycle")
        if kind in self.alone and done[0] >= len(KINDS):
            self.alone[kind].append(1000 * (time.perf_counter() - begin))
        if done[1] == 0:
            hvd.barrier()
            if done[0] > len(KINDS):  # the first round makes memory
                self.steps[kind].append(1000 * (time.perf_counter() - self.before) / BLOCK)
            if done[0] == len(KINDS):
                self.elastic.commits.clear()
            self.elastic.commit_every_n_steps = (
                1 if KINDS[done[0] % len(KINDS)] == "elastic" else NEVER
            )
            self.before = time.perf_counter()

    def copy(self, task: Any) -> None:
        """Copy weights and optimizer state."""
        tensors = [
            *task.parameters(),
            *(t for state in self.optimizer.state.values() for t in state.values()),
        ]
        self.held = self.held or [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            for held, tensor in zip(self.held, tensors, strict=True):
                held.copy_(tensor)


def rank(model: str, steps: int, out: str) -> None:
    """Train on one rank; rank 0 writes its medians."""
    torch.set_num_threads(1)
    elastic = Timed()
    kinds = Kinds(elastic)
    trainer = trainkit.Trainer(
        max_steps=steps,
        callbacks=[elastic, kinds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=str(Path(out).parent / "run"),
    )
    trainer.fit(
        Perceptron(*MODELS[model]),
        DataLoader(TensorDataset(torch.randn(2 * BATCH * steps, INPUTS)), BATCH),
    )
    if trainer.is_global_zero:
        alone = {
            kind: statistics.median(taken)
            for kind, taken in (kinds.alone | {"elastic": elastic.commits}).items()
        }
        megabytes = sum(tensor.numel() * tensor.element_size() for tensor in kinds.held) / 1e6
        Path(out).write_text(json.dumps({"steps": kinds.steps, "alone": alone, "MB": megabytes}))


def run_ranks(model: str, steps: int) -> dict[str, Any]:
    """Start two ranks and return rank 0's results."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        launch = [
            sys.executable,
            "-m",
            "horovod.runner.launch",
            "--gloo",
            "-np",
            "2",
            "--min-np",
            "2",
            "-H",
            "localhost:2",
        ]
        command = [
            *launch,
            sys.executable,
            "-m",
            "benchmarks.elastic",
            "rank",
            model,
            str(steps),
            out,
        ]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False, timeout=400
        )
        if not os.path.exists(out):
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return dict(json.loads(Path(out).read_text()))


def measure(short: bool) -> Findings:
    """Measure both models (the small one alone in short form)."""
    rounds = {"small": 1} if short else {"small": 20, "large": 14}
    findings = Findings(
        settings={
            "ranks": 2,
            "threads of a rank": 1,
            "batch_size": BATCH,
            "steps of a block": BLOCK,
        }
    )
    rows: list[list[Cell]] = []
    for model, times in rounds.items():
        seen = run_ranks(model, BLOCK * len(KINDS) * (1 + times))
        plain, alone = seen["steps"]["none"], seen["alone"]
        rows.append([f"{model}, {seen['MB']:.3g} MB: a step", statistics.median(plain), None])
        for kind, name in NAMES.items():
            added = [
                with_it - without
                for with_it, without in zip(seen["steps"][kind], plain, strict=True)
            ]
            rows.append([f"{model}: {name}", alone[kind], statistics.median(added)])
        what = f"a commit each step, {model} model (two cycles and one copy)"
        findings.targets.append(
            Target(what, alone["elastic"], 2 * alone["cycle"] + alone["copy"], "ms")
        )
    findings.tables.append(
        Table(
            "A commit after each step, ms",
            ["model, with Adam's state", "by itself", "added to a step"],
            rows,
        )
    )
    return findings


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(measure)
