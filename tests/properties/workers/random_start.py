"""One start of a run: trains from the run's newest checkpoint to the end, unless one rank kills
itself on the way.

    LAUNCHER random_start.py RUN_DIR SETTINGS

SETTINGS is a Start in JSON. A step has 12 samples on any number of ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainkit
from trainkit.callbacks import EMA, LearningRateMonitor, ModelCheckpoint
from trainkit.loggers import CSVLogger

STEP, EPOCHS = 12, 3
DEATH = "death"


@dataclass(frozen=True)
class Start:
    """How one start trains.

    Attributes:
        engine: its name.
        ranks: their number.
        accumulate: microbatches of a step.
        workers: of the loader.
        kind: "map" or "stream" of data, or "manual" for an update by the Task's own hand.
        ema: whether there is an EMA.
        every: steps from one checkpoint to the next.
        dies: (rank, step after which it kills itself), or null.
    """

    engine: str
    ranks: int
    accumulate: int
    workers: int
    kind: str
    ema: bool
    every: int
    dies: tuple[int, int] | None


def sample(index: int) -> tuple[Tensor, Tensor]:
    """Return a sample by its number."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x, x.sum(0, keepdim=True).tanh()


class Samples(Dataset[Any]):
    """Samples by their numbers; the last step of an epoch has 5,
    except where each update is the Task's own.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return sample(index)


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(index) for index in range(41))


class Net(trainkit.Task):
    """Two layers with dropout's randomness left out: it is a rank's own."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, or take the step."""
        loss = (self.net(batch[0]) - batch[1]).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        """Return Adam with a rate that falls at each step."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Death(trainkit.Callback):
    """Kills one rank after a step; the file DEATH beside the run's folder says so."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_step_end(self, trainer: Any, task: Any, *arguments: Any) -> None:
        """Kill this process."""
        if trainer.global_step >= self.step and trainer.global_rank == self.rank:
            (trainer.run_dir.parent / DEATH).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(run_dir: str, start: Start) -> None:
    """Train."""
    callbacks: list[trainkit.Callback] = [
        ModelCheckpoint(every_n_train_steps=start.every, save_on_exception=False),
        LearningRateMonitor(),
    ]
    callbacks += [EMA(decay=0.9)] * start.ema
    callbacks += [] if start.dies is None else [Death(*start.dies)]
    trainer = trainkit.Trainer(
        engine=start.engine,
        max_epochs=EPOCHS,
        accumulate_grad_batches=start.accumulate,
        callbacks=callbacks,
        logger=CSVLogger(),
        lr_scaling="none",
        log_every_n_steps=2,
        precision="64-true",
        run_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    by_hand = start.kind == "manual"
    data: Any = Stream() if start.kind == "stream" else Samples(36 if by_hand else 41)
    own = {"batch_size": STEP // start.ranks // start.accumulate, "num_workers": start.workers}
    train = DataLoader(data, shuffle=start.kind != "stream", **own)
    trainer.fit(Net(by_hand), train, DataLoader(Samples(10), batch_size=2), ckpt_path="auto")


if __name__ == "__main__":
    main(sys.argv[1], Start(**json.loads(sys.argv[2])))
