"""What it costs to see everything: steps of conf=resnet50 with all monitors and loggers on, beside none, in one run.

    python tests/benchmarks/watching.py [--ranks 2] [--blocks 12] [--block 20] [--conf resnet50] [--json FILE]

Blocks of steps take turns, off, on, off, on, ..., in the same processes of one training: the hooks of all callbacks and
loggers are taken out of the loop and put back. Each block has one step at which values are logged. A block's figure is the
mean of its steps, so that what comes once a block counts; the result is the median over pairs of neighbouring blocks.
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
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from trainkit.build import build
from trainkit.callback import Callback
from trainkit.config import Job, run
from trainkit.hooks import Hooks

CALLBACKS = "learning_rate,device_stats,throughput,gradients,spikes,capsule,stragglers,goodput,timer,timeline,progress"
OF_A_STEP = {
    *(f"on_train_{what}_{when}" for what in ("step", "batch") for when in ("start", "end")),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_metrics"),
}
LOGGERS = "csv,jsonl,tensorboard,wandb,mlflow,prometheus"


class Off:
    """Hooks without those of a step; epochs begin and end as ever, so that callbacks know where they are."""

    def __init__(self, on: Hooks, turns: TakesTurns, trainer: Any, task: Any) -> None:
        self.on, self.left = on, Hooks(trainer, task, [turns])

    def __call__(self, name: str, *args: Any) -> None:
        """Call what is left."""
        (self.left if name in OF_A_STEP else self.on)(name, *args)


class TakesTurns(Callback):
    """Takes all other hooks out of the loop, and puts them back, block by block; notes the seconds of each block."""

    def __init__(self, block: int) -> None:
        self.block, self.seconds = block, list[float]()

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Begin with everything off."""
        run = trainer.session.run
        self.on, self.off = run.hooks, Off(run.hooks, self, trainer, task)
        run.hooks, self.before = self.off, time.perf_counter()

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Change at the end of a block."""
        if trainer.global_step % self.block == 0:
            hvd.barrier()  # both ranks change at the same time, and end the block together
            now = time.perf_counter()
            self.seconds.append((now - self.before) / self.block)
            run = trainer.session.run
            run.hooks, self.before = (self.on if run.hooks is self.off else self.off), now


def worker(options: argparse.Namespace) -> None:
    """Train, and write rank 0's seconds of each block."""
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    folder, jobs = tempfile.mkdtemp(), list[Job]()
    settings = [
        f"conf={options.conf}",
        f"callbacks=[{CALLBACKS}]",
        f"logger=[{LOGGERS}]",
        f"run_dir={folder}",
        f"trainer.max_steps={options.block * options.blocks}",
        "trainer.max_epochs=null",
        f"trainer.log_every_n_steps={options.block}",
        "trainer.limit_val_batches=0",
        "trainer.enable_checkpointing=false",
        "callbacks.timeline.start_step=null",
        "logger.prometheus.port=0",
    ]
    run("fit", settings, False, jobs.append)
    turns = TakesTurns(options.block)
    built = build(jobs[0].config, [turns])
    built.trainer.callbacks.remove(turns)
    built.trainer.callbacks.append(turns)  # behind what it takes out
    built.trainer.fit(built.task, datamodule=built.datamodule)
    if hvd.rank() == 0:
        Path(options.worker).write_text(json.dumps(turns.seconds))


def main() -> None:
    """Start the ranks and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--conf", default="resnet50")
    parser.add_argument("--json", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds.json"
        start = [sys.executable, "-m", "horovod.runner.launch", "-np", str(options.ranks), "--gloo", sys.executable, __file__]
        own = ["--blocks", str(options.blocks), "--block", str(options.block), "--conf", options.conf, "--worker", out]
        root = Path(__file__).parents[2]
        subprocess.run(
            [*start, *own],
            check=True,
            env=os.environ | {"PYTHONPATH": str(root), "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        )
        seconds = json.loads(Path(out).read_text())
    off, on = seconds[0::2], seconds[1::2]
    pairs = [b / a - 1 for a, b in zip(off[1:], on[1:], strict=False)]  # the first pair warms up
    result = {
        "off_ms": 1000 * statistics.median(off[1:]),
        "on_ms": 1000 * statistics.median(on[1:]),
        "cost": statistics.median(pairs),
        "pairs": pairs,
    }
    print(f"{options.conf}, {options.ranks} ranks: off {result['off_ms']:.2f} ms a step, on {result['on_ms']:.2f} ms a step")
    print(f"cost, median of {len(pairs)} pairs of blocks of {options.block} steps: {100 * result['cost']:+.2f} %")
    print("each pair: " + ", ".join(f"{100 * pair:+.1f} %" for pair in pairs))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
