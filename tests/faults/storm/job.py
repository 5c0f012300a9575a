"""What the ranks of a storm run: a fit whose last weights show which samples they come from.

    job.py RUN_DIR NOTES JSON        {"pace_s": 0.02, "epochs": null, "elastic": true, "engine": "ddp"}

A parameter of the Task counts the samples: its gradient is minus each sample's share of a step, and
its rate is the step's number of samples, so a step adds one to each of its samples. The counts
travel as gradients do (through the sums over ranks, the commits and the checkpoints), and roll back
with the weights. After each epoch all must be equal.

Without "epochs" the fit ends when NOTES/last_epoch holds the number of an epoch that was yet to
come when the file was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks import Elastic, Goodput, ModelCheckpoint, Watchdog
from trainkit.cli.guard import fail
from trainkit.device.shards import whole_of
from trainkit.engine.select import make_engine
from trainkit.errors import JobEnded, TrainkitError
from trainkit.launch.environment import read_launcher
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer

SAMPLES, STEP = 480, 12  # samples of an epoch and of a step
RANKS = {"horovod": 3, "ddp": 3, "fsdp": 4}  # of the run's beginning, by engine
REPLICAS = 2  # of split weights
STALL_S = 6.0
_EXACT = 1e-9


class Counted(Task):
    """Two layers in float64 under SGD with momentum, and a count of each sample."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        # epochs in which a sample did not count once
        self.register_buffer("uneven", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, with the counts."""
        x, y, ids = batch
        loss = functional.mse_loss(self.model(x), y)
        self.log("train/loss", loss)
        return loss - self.seen[ids].mean() + self.seen[ids].mean().detach()

    def configure_optimizers(self) -> Any:
        """Return SGD: momentum for the weights, a plain sum for the counts."""
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.parameters()), "lr": 0.01, "momentum": 0.9}
        ]
        groups.append({"params": [self.seen], "lr": float(STEP), "momentum": 0.0})
        return torch.optim.SGD(groups, lr=0.01)

    def on_train_epoch_end(self) -> None:
        """Note an epoch in which a sample did not count once."""
        seen = whole_of(self.seen.detach())
        off = (seen - (self.trainer.current_epoch + 1)).abs().max() > _EXACT
        self.uneven += off.long()


class Notes(Callback):
    """Reports the step, keeps the pace, and ends the fit when asked."""

    def __init__(self, folder: Path, pace_s: float) -> None:
        self._folder, self._pace_s = folder, pace_s
        self.epochs: list[list[float]] = []  # the weights after each epoch of this process

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Note when the first process of the job came here."""
        with contextlib.suppress(FileExistsError), (self._folder / "began").open("x") as file:
            file.write(str(time.time()))

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Report, and wait."""
        if trainer.is_global_zero:
            draft = self._folder / f"step-{os.getpid()}"
            draft.write_text(f"{trainer.global_step} {trainer.current_epoch} {trainer.world_size}")
            draft.replace(self._folder / "step")
        with contextlib.suppress(FileNotFoundError):
            self._pace_s = float((self._folder / "pace").read_text())
        time.sleep(self._pace_s * len(batch[0]) * trainer.world_size / STEP)

    def on_train_epoch_end(self, trainer: RunView, task: Any) -> None:
        """Keep the weights, and end after the last epoch."""
        self.epochs.append(flat(task))
        with contextlib.suppress(FileNotFoundError):
            if trainer.current_epoch + 1 >= int((self._folder / "last_epoch").read_text()):
                trainer.should_stop = True


def flat(task: Any) -> list[float]:
    """Return the model's weights."""
    weights = [whole_of(p.detach()) for p in task.model.parameters()]
    return torch.cat([weight.flatten() for weight in weights]).tolist()


def samples() -> TensorDataset:
    """Return x, y and the number of each sample, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(
        SAMPLES, 1, generator=generator, dtype=torch.float64
    )
    return TensorDataset(x, y, torch.arange(SAMPLES))


def main() -> None:
    """Fit, and write down how it ended."""
    run_dir, notes, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    task, is_elastic = Counted(), bool(given["elastic"])
    here = Notes(notes, given["pace_s"])
    callbacks: list[Callback] = [Goodput(), here]
    if is_elastic:
        callbacks += [Elastic(commit_every_n_steps=3), Watchdog(stall_timeout_s=STALL_S)]
        callbacks.append(ModelCheckpoint(every_n_train_steps=15, every_n_epochs=1, save_top_k=3))
    is_split = given["engine"] == "fsdp"
    trainer = Trainer(
        engine=make_engine("fsdp", replicas=REPLICAS) if is_split else given["engine"],
        max_epochs=given["epochs"] or 10**6,
        precision="64-true",
        lr_scaling="none",
        global_batch_size=None if is_elastic else STEP,
        run_dir=str(run_dir),
        callbacks=callbacks,
        logger=[CSVLogger()],
        enable_checkpointing=is_elastic,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
    )
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if is_elastic else {}
    data = DataLoader(
        samples(), batch_size=STEP // RANKS.get(given["engine"], 3), shuffle=True, **workers
    )
    trainer.fit(task, data, ckpt_path="auto")
    end: dict[str, Any] = {
        "step": trainer.global_step,
        "uneven": int(task.uneven),
        "seen": whole_of(task.seen.detach()).tolist(),
    }
    end |= {"weights": flat(task), "by_epoch": [] if is_elastic else here.epochs}
    draft = notes / f".end-{os.getpid()}"
    draft.write_text(json.dumps(end))
    draft.replace(notes / f"end-{os.getpid()}.json")


if __name__ == "__main__":
    try:
        main()
    except JobEnded as error:
        sys.exit(fail(error, read_launcher(), "" if error.is_reported else str(error), 1))
    except TrainkitError as error:
        sys.exit(fail(error, read_launcher(), str(error), error.exit_code))
    except Exception as error:
        sys.exit(fail(error, read_launcher(), traceback.format_exc(), 1))
