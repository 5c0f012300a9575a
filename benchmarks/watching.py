"""The cost of all monitors and loggers: steps with all of them, beside steps with none, in one run.

    python -m benchmarks.watching [--short] [--json FILE]

Blocks of steps take turns, off, on, off, on, ..., in the same processes of one training: the hooks
of all callbacks and loggers are taken out of the loop and put back. Each block has one step that
logs values. A block's figure is the mean of its steps, so costs once a block count; the result is
the median over pairs of neighbouring blocks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks.harness import Cell, Findings, Table, main, quartiles
from benchmarks.processes import answer, environment
from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.config.compose import ComposedJob, run
from trainkit.config.instantiate import build

CALLBACKS = "learning_rate,device_stats,throughput,gradients,spikes,capsule,stragglers,goodput,timer,timeline,progress"
OF_A_STEP = {
    *(f"on_train_{what}_{when}" for what in ("step", "batch") for when in ("start", "end")),
    *(
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_metrics",
    ),
}
LOGGERS = "csv,jsonl,tensorboard,wandb,mlflow,prometheus"


class Off:
    """Hooks without those of a step; epochs begin and end as usual, for the callbacks' counters."""

    def __init__(self, on: Hooks, turns: TakesTurns, trainer: Any, task: Any) -> None:
        self.on, self.left = on, Hooks(trainer, task, [turns])

    def __call__(self, name: str, *args: Any) -> None:
        """Call the remaining hooks."""
        (self.left if name in OF_A_STEP else self.on)(name, *args)

    def ends_epoch(self, name: str, *args: Any) -> bool:
        """Call the remaining ones; return whether one ends the epoch."""
        return (self.left if name in OF_A_STEP else self.on).ends_epoch(name, *args)

    def __getattr__(self, name: str) -> Any:
        """Answer as all hooks do."""
        return getattr(self.on, name)


class TakesTurns(Callback):
    """Takes all other hooks out of the loop, and puts them back, block by block;
    records the seconds of each block.
    """

    def __init__(self, block: int) -> None:
        self.block, self.seconds = block, list[float]()

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Begin with everything off."""
        run = trainer
        self.on, self.off = run.hooks, Off(run.hooks, self, trainer, task)
        run.hooks, self.before = self.off, time.perf_counter()

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Change at the end of a block."""
        if trainer.global_step % self.block == 0:
            hvd.barrier()  # both ranks change at the same time, and end the block together
            now = time.perf_counter()
            self.seconds.append((now - self.before) / self.block)
            run = trainer
            run.hooks, self.before = (self.on if run.hooks is self.off else self.off), now


def worker(conf: str, block: int, blocks: int, out: str) -> None:
    """Train, and write rank 0's seconds of each block."""
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    jobs = list[ComposedJob]()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"conf={conf}",
            f"callbacks=[{CALLBACKS}]",
            f"logger=[{LOGGERS}]",
            f"run_dir={folder}",
            f"trainer.max_steps={block * blocks}",
            "trainer.max_epochs=null",
            f"trainer.log_every_n_steps={block}",
            "trainer.limit_val_batches=0",
            "trainer.enable_checkpointing=false",
            "callbacks.timeline.start_step=null",
            "logger.prometheus.port=0",
        ]
        run("fit", settings, False, jobs.append)
        turns = TakesTurns(block)
        built = build(jobs[0].config, [turns])
        built.trainer.callbacks.remove(turns)
        built.trainer.callbacks.append(turns)  # after the callbacks that it takes out
        built.trainer.fit(built.task, datamodule=built.datamodule)
    if hvd.rank() == 0:
        Path(out).write_text(json.dumps(turns.seconds))


def measure(short: bool) -> Findings:
    """Train each recipe at 2 ranks."""
    rows: list[list[Cell]] = []
    quiet = environment(WANDB_MODE="offline", WANDB_SILENT="true")
    for conf, blocks in (("mlp", 4),) if short else (("resnet50", 14), ("mlp", 40)):
        block = 4 if short else 20
        seconds: list[float] = answer(
            __spec__.name, conf, str(block), str(blocks), env=quiet, ranks=2
        )
        off, on = seconds[0::2], seconds[1::2]
        pairs = [b - a for a, b in zip(off[1:], on[1:], strict=False)]  # the first pair warms up
        shares = [100 * (b / a - 1) for a, b in zip(off[1:], on[1:], strict=False)]
        added = 1000 * statistics.median(pairs)
        rows.append(
            [
                conf,
                1000 * statistics.median(off[1:]),
                added,
                statistics.median(shares),
                quartiles(shares),
            ]
        )
    columns = ["", "a step with nothing on, ms", "added, ms", "added, %", "quartiles of pairs, %"]
    title = "All monitors and six loggers, one log in 20 steps, 2 ranks on Horovod"
    return Findings([Table(title, columns, rows)], settings={"steps a block": block, "ranks": 2})


if __name__ == "__main__":
    if len(sys.argv) > 4:
        worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main(measure)
