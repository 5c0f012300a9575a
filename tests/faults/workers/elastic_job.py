"""What the ranks of test_elastic.py run: a fit in which each rank writes down the samples that it
trains on.

elastic_job.py RUN_DIR JSON       {"faults": [...], "commit": 3, "every": null, "epochs": 5, "stall_s": 120, "waits_for": 2,
                                   "slow_s": 0, "every_n_steps": 0, "by_hand": false,
                                   "num_workers": 0}

`setup` and `configure_optimizers` take "slow_s" seconds each. With "every_n_steps" ranks step alone
between outer steps, and a ledger of goodput is kept. "by_hand" is a trainkit.Loop, not a Trainer's
fit.

While there are fewer ranks than "waits_for", steps take longer, and after some of them much longer,
so that a new worker can join in time on a machine that has other work too.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.toy import Line, Numbered, Numbers
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import Elastic, FaultInjection, Goodput, ModelCheckpoint, Watchdog
from trainkit.cli.guard import fail
from trainkit.errors import JobEnded
from trainkit.extensions.by_hand.loop import Loop
from trainkit.extensions.communication.settings import DiLoCo
from trainkit.launch.environment import read_launcher
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer

SAMPLES, BATCH, STEP_S = 96, 4, 0.1


class Journal(Callback):
    """A line for each microbatch, in a file of this process's own."""

    def __init__(self, run_dir: Path, waits_for: int) -> None:
        self._waits_for = waits_for
        self._short_steps = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / f"journal-{os.getpid()}.jsonl").open("a")

    def on_train_batch_start(
        self, trainer: RunView, task: Line, batch: Any, batch_idx: int
    ) -> None:
        """Write it down before it counts."""
        scope = os.environ.get(
            "HOROVOD_RENDEZVOUS_SCOPE",
            "g" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") + ".",
        )
        line = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "ids": batch[2].tolist(),
            "t": time.monotonic(),
        }
        line |= {
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "generation": int(scope[1:-1]),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        is_short = trainer.world_size < self._waits_for and "TORCHELASTIC_RUN_ID" not in os.environ
        self._short_steps += is_short
        patience = 1 if not is_short else 4 if self._short_steps < 20 else 20
        time.sleep(patience * STEP_S)


class Slow(Numbers):
    """Takes its time before training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def setup(self, stage: str) -> None:
        """Take it."""
        time.sleep(self.seconds)

    def configure_optimizers(self) -> Any:
        """Take it again."""
        time.sleep(self.seconds)
        return super().configure_optimizers()


def fit_by_hand(task: Line, *data: Any, **settings: Any) -> Trainer:
    """Train a Task's model as a Task's fit does, in a loop of the script's own."""
    model, mse = task.model, functional.mse_loss
    loop = Loop(model, task.configure_optimizers(), *data, **settings)
    with loop:
        for _ in loop.epochs():
            for x, y, _ in loop.batches():
                loss = mse(model(x), y)
                loop.log("train/x", x.double().mean(), on_step=False, on_epoch=True)
                loop.log("train/loss", loss)
                loop.backward(loss)
            for x, y, _ in loop.validation():
                loop.log("val/loss", mse(model(x), y))
    return loop.trainer


def main() -> None:
    """Fit."""
    run_dir, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    task = Slow(asked["slow_s"])
    callbacks: list[Callback] = [
        FaultInjection(asked["faults"]),
        Journal(run_dir, asked["waits_for"]),
    ]
    callbacks += [
        Elastic(commit_every_n_steps=asked["commit"]),
        Watchdog(stall_timeout_s=asked["stall_s"]),
    ]
    callbacks.append(ModelCheckpoint(every_n_train_steps=asked["every"], every_n_epochs=1))
    every = asked.get("every_n_steps", 0)
    callbacks += [Goodput()] * bool(every)
    settings: dict[str, Any] = {
        "communication": DiLoCo(every_n_steps=every, outer_momentum=0.5) if every else "exact",
        "max_epochs": asked["epochs"],
        "run_dir": str(run_dir),
        "callbacks": callbacks,
        "logger": [CSVLogger()],
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1000,
    }
    data = (
        DataLoader(
            Numbered(SAMPLES),
            batch_size=BATCH,
            shuffle=True,
            num_workers=asked.get("num_workers", 0),
        ),
        DataLoader(Numbered(SAMPLES), batch_size=BATCH),
    )
    ckpt_path = "auto" if "TORCHELASTIC_RUN_ID" in os.environ else None
    if asked.get("by_hand"):
        trainer = fit_by_hand(task, *data, ckpt_path=ckpt_path, **settings)
    else:
        trainer = Trainer(**settings)
        trainer.fit(task, *data, ckpt_path=ckpt_path)
    weights = torch.cat([p.detach().flatten() for p in task.parameters()]).tolist()
    (run_dir / f"end-{os.getpid()}.json").write_text(
        json.dumps({"weights": weights, "step": trainer.global_step})
    )


if __name__ == "__main__":
    try:
        main()
    except JobEnded as error:
        fail(error, read_launcher(), "" if error.is_reported else str(error), 1)
    except Exception as error:
        fail(error, read_launcher(), traceback.format_exc(), 1)
