"""What the ranks of these tests run: the storm's fit (tests/faults/storm/job.py), under any
launcher, with checkpoints.

job.py RUN_DIR NOTES JSON        {"pace_s": 0.02, "epochs": 2, "elastic": true}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.faults.storm.job import STEP, Counted, Notes, flat, samples
from trainkit.api.callback import Callback
from trainkit.callbacks import Elastic, ModelCheckpoint, Watchdog
from trainkit.cli.guard import guarded
from trainkit.launch.environment import read_launcher
from trainkit.trainer import Trainer

STALL_S = 10.0


def main() -> None:
    """Fit, and write down how it ended."""
    run_dir, notes, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    task, ranks = Counted(), 2
    notes.mkdir(parents=True, exist_ok=True)
    callbacks: list[Callback] = [
        Notes(notes, given["pace_s"]),
        ModelCheckpoint(every_n_train_steps=10, every_n_epochs=1, save_top_k=2),
    ]
    if given["elastic"]:
        callbacks.append(Elastic(commit_every_n_steps=3))
    if given.get("watchdog"):
        callbacks.append(Watchdog(stall_timeout_s=STALL_S))
    trainer = Trainer(
        max_epochs=given["epochs"],
        precision="64-true",
        lr_scaling="none",
        global_batch_size=None if given["elastic"] else STEP,
        run_dir=str(run_dir),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
    )
    trainer.fit(
        task, DataLoader(samples(), batch_size=STEP // ranks, shuffle=True), ckpt_path="auto"
    )
    end: dict[str, Any] = {
        "step": trainer.global_step,
        "uneven": int(task.uneven),
        "seen": task.seen.tolist(),
    }
    (notes / f"end-{os.getpid()}.json").write_text(json.dumps(end | {"weights": flat(task)}))


if __name__ == "__main__":
    code = guarded(main, read_launcher())
    sys.stdout.flush()
    sys.exit(code)
