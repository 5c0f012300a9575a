"""Two ranks of which one is three times slower: trainer.rank_shares and callbacks=balance beside
even shares.

    python -m benchmarks.unequal [--short] [--json FILE]

Two ranks of ddp train a small model; each sleeps for each sample of its microbatch, 4 ms on the
first rank and 12 ms on the second, in place of computing. Even shares, [3, 1], and even ones that
callbacks=balance changes by what it measures take turns in the same processes; a figure is the
ratio of a step's time in the same round. With 3/4 and 1/4 of the samples both ranks need the same
time: half of that of even shares, so 2.0 is ideal. Steps count once balance has looked three times.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Cell, Findings, Table, Target, main, take_turns
from benchmarks.processes import answer, environment, in_turns

EVEN, SHARES, BALANCE = "even", "rank_shares=[3,1]", "callbacks=balance"
MS, BATCH, LOOK = (4, 12), 16, 4
WARM = 3 * LOOK + 1
_SHARES = {EVEN: None, SHARES: [3, 1], BALANCE: None}


def train(shares: list[int] | None, balances: bool, steps: int) -> list[float]:
    """Train on this rank; return the seconds of each step."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import trainkit.callbacks

    begins: list[float] = []

    class Task(trainkit.Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            begins.append(time.perf_counter())
            time.sleep(len(batch[0]) * MS[self.trainer.global_rank] / 1000)
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = DataLoader(TensorDataset(torch.randn(BATCH * 2 * (steps + WARM + 1), 8)), BATCH)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainkit.Trainer(
            engine="ddp",
            max_steps=steps + WARM + 1,
            rank_shares=shares,
            callbacks=[trainkit.callbacks.Balance(every_n_steps=LOOK)] if balances else None,
            run_dir=folder if os.environ["RANK"] == "0" else None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Task(), data)
    return [after - before for before, after in zip(begins, begins[1:], strict=False)][WARM:]


def worker(rounds: int, steps: int, out: Path) -> None:
    """Let both take turns on this rank; rank 0 writes the time of each step."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    contenders = {
        name: partial(train, shares, name == BALANCE, steps) for name, shares in _SHARES.items()
    }
    taken = (
        take_turns(contenders, rounds, dist.barrier)
        if rounds
        else in_turns(contenders, 0, at_once=1)
    )
    if dist.get_rank() == 0:
        out.write_text(json.dumps(taken))
    dist.barrier()


def measure(short: bool) -> Findings:
    """Measure both."""
    rounds, steps = (0, 2) if short else (5, 10)
    taken = answer(
        "benchmarks.unequal",
        "--worker",
        str(rounds),
        str(steps),
        env=environment(),
        ranks=2,
        torchrun=True,
    )
    medians = {
        name: [1000 * statistics.median(seconds) for seconds in own] for name, own in taken.items()
    }
    rows: list[list[Cell]] = [[EVEN, statistics.median(medians[EVEN]), 1.0, None]]
    targets = []
    for name in (SHARES, BALANCE):
        ratios = [even / uneven for even, uneven in zip(medians[EVEN], medians[name], strict=True)]
        usual = statistics.median(ratios)
        rows.append(
            [
                name,
                statistics.median(medians[name]),
                usual,
                f"{min(ratios):.3f} to {max(ratios):.3f}",
            ]
        )
        targets.append(Target(f"{name}, of even shares: speed", usual, 1.8, "times", "at least"))
    table = Table(
        "Two ranks, one three times slower", ["", "step, ms", "times as fast", "rounds"], rows
    )
    settings: dict[str, Cell] = {"ms a sample": "4 and 12", "batch a rank": BATCH, "rounds": rounds}
    return Findings([table], targets, {}, settings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(measure)
