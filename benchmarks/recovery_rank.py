"""A rank of benchmarks/recovery.py: trains until it is ended, and writes each step down with its
time.

    python -m benchmarks.recovery_rank FOLDER WIDTH

The times of all processes of a host are of one clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit

STEP_S, INPUTS, BATCH, FOREVER = 0.05, 64, 2, 10**6


class Noted(trainkit.Task):
    """Three layers, trained by Adam;
    each step waits, as if a device computed, so that two ranks leave cores to a third.
    """

    def __init__(self, folder: Path, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUTS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )
        self.file = (folder / f"steps-{os.getpid()}").open("a")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the step as it begins, and train."""
        trainer = self.trainer
        note = {
            "t": time.monotonic(),
            "step": trainer.global_step,
            "ranks": trainer.world_size,
            "rank": trainer.global_rank,
        }
        note |= {
            "generation": int(os.environ["HOROVOD_RENDEZVOUS_SCOPE"][1:-1]),
            "pid": os.getpid(),
        }
        self.file.write(json.dumps(note) + "\n")
        self.file.flush()
        time.sleep(STEP_S)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class TimedElastic(trainkit.Elastic):
    """Notes when this rank has seen a change of ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(commit_every_n_steps=1)
        self.file = (folder / f"seen-{os.getpid()}").open("a")

    def fit(self, fit_once: Callable[[Any], None]) -> None:
        """Fit, and again after each change."""

        def noted(state: Any) -> None:
            try:
                fit_once(state)
            except BaseException:
                self.file.write(f"{time.monotonic()}\n")
                self.file.flush()
                raise

        super().fit(noted)


def main() -> None:
    """Train."""
    folder, width = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    trainer = trainkit.Trainer(
        max_steps=FOREVER,
        global_batch_size=2 * BATCH,
        callbacks=[TimedElastic(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=str(folder / "run"),
    )
    trainer.fit(
        Noted(folder, width),
        DataLoader(TensorDataset(torch.randn(2_000, INPUTS)), BATCH, shuffle=True),
    )


if __name__ == "__main__":
    main()
