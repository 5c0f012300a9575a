"""The Task of the tests' jobs: each rank writes the samples of each microbatch down,
in a file of its process's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainkit
from trainkit.launch.environment import rank

SAMPLES = 61


class Numbered(Dataset[Any]):
    """Rows that know their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index / SAMPLES), torch.tensor(index)


class Journalled(trainkit.Task):
    """A line, trained by SGD.

    Args:
        pause_s: of each microbatch, until there is a file "hurry".
        fails_at: the step in which rank 1 raises an error; -1: before the ranks meet.
        exit_code: if it is given, rank 1 calls sys.exit instead.
    """

    def __init__(
        self, pause_s: float = 0.0, fails_at: int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.net = nn.Linear(4, 1)
        self.pause_s, self.fails_at = pause_s, fails_at
        self.exit_code = exit_code
        if fails_at == -1 and rank() == 1:
            raise ValueError("a mistake of the user's")
        self.folder = Path(os.environ["TRAINKIT_JOURNAL"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Write it down, and train."""
        x, ids = batch
        trainer = self.trainer
        scope = os.environ.get(
            "HOROVOD_RENDEZVOUS_SCOPE", f"g{os.environ.get('SLURM_RESTART_COUNT', '0')}."
        )
        line = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "ids": ids.tolist(),
            "t": time.time(),
        }
        line |= {
            "rank": trainer.global_rank,
            "ranks": trainer.world_size,
            "pid": os.getpid(),
            "generation": int(scope[1:-1] or 0),
        }
        with (self.folder / f"journal-{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(0 if (self.folder / "hurry").exists() else self.pause_s)
        if self.fails_at == trainer.global_step and trainer.global_rank == 1:
            if self.exit_code is not None:
                sys.exit(self.exit_code)
            raise ValueError("a mistake of the user's")
        return (self.net(x) - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(Numbered(), batch_size=2, shuffle=True)

    def on_fit_end(self) -> None:
        """Write the weights down."""
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in self.parameters()]
        weights = [value for weight in whole for value in weight.flatten().tolist()]
        end = json.dumps({"weights": weights, "step": self.trainer.global_step})
        (self.folder / f"end-{os.getpid()}").write_text(end)
