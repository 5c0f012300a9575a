"""A run with all the state that a restart could lose:
dropout, batch norm, augmentation in workers, EMA, fp16 scaling.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import trainkit
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA


class Noisy(Dataset[Any]):
    """Rows under random augmentation."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x_I = torch.randn(6, generator=generator)
        return x_I + 0.1 * torch.randn(6), x_I.sum().reshape(1)


class Job(trainkit.Task):
    """Dropout, batch norm, a metric object, a schedule;
    a bigger layer makes its checkpoints take a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)
        )
        self.wide = nn.Linear(1, int(os.environ.get("JOB_WIDTH", "100")))
        self.error = torchmetrics.MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log a value and a metric object."""
        x, y = batch
        # what self.wide(x[:, :1]).mean(1) is, without its many products in float16
        wide = x[:, :1] * self.wide.weight.mean() + self.wide.bias.mean()
        out = self.net(x) + 0.01 * wide
        loss = functional.mse_loss(out, y)
        self.error(out.detach().float(), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/mae", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss; a random number drawn here must not change
        a run that is interrupted here.
        """
        x, y = batch
        self.log("val/loss", functional.mse_loss(self.net(x + 0.01 * torch.randn_like(x)), y))

    def configure_optimizers(self) -> Any:
        """Adam under a schedule of steps and one of epochs."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.97)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": plateau, "monitor": "val/loss"},
        ]


class Marker(Callback):
    """Touches a file when the first step of this start has been taken."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Touch it."""
        if trainer.is_global_zero and not hasattr(self, "touched"):
            self.touched = True
            (trainer.run_dir / "stepping").touch()
        # as a full disk would
        if trainer.global_step == int(os.environ.get("JOB_FILE_LIMIT_FROM_STEP", "-1")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Block forever in this step, or kill the last rank in it,
        if the environment asks for it.
        """
        died = trainer.run_dir / "died"
        if (
            os.environ.get("JOB_DIES_AT") == str(trainer.global_step)
            and trainer.global_rank == 1
            and not died.exists()
        ):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("JOB_STUCK"):
            (trainer.run_dir / f"stuck{trainer.global_rank}").touch()
            while True:
                time.sleep(0.1)


def run(run_dir: str, max_steps: int, workers: int = 2) -> None:
    """Train up to a step, from the newest checkpoint if there is one."""
    data = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    keeper = trainkit.ModelCheckpoint(
        monitor="val/loss", every_n_train_steps=3, every_n_epochs=1, save_top_k=2
    )
    trainer = trainkit.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        precision="16-mixed",
        log_every_n_steps=1,
        logger=trainkit.CSVLogger(),
        callbacks=[EMA(decay=0.9), Marker(), keeper],
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=run_dir,
    )
    trainkit.seed_everything(3)
    trainer.fit(Job(), data, DataLoader(Noisy(), 16), ckpt_path="auto")


def serve() -> None:
    """Fork pairs of ranks as asked on stdin ("RUN_DIR STEPS PORT"):
    torch is imported once, so that a start takes little.
    """
    for name in ("trainkit.trainer", "trainkit.loggers.csv", "trainkit.engine.ddp.engine"):
        importlib.import_module(name)
    gc.freeze()  # what is imported is not looked at again in each fork
    for line in sys.stdin:
        run_dir, steps, port = line.split()
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ |= {
                    "TORCHELASTIC_RUN_ID": "faults",
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": str(rank),
                }
                os.environ |= {
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                out = os.open(
                    Path(run_dir).with_suffix(f".rank{rank}.log"),
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
                )
                os.dup2(out, 1)
                os.dup2(out, 2)
                code = 1
                try:
                    run(run_dir, int(steps), workers=rank)
                    code = 0
                except SystemExit as ended:
                    code = int(ended.code or 0)
                finally:
                    sys.stdout.flush()
                    if code == 1:
                        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                    os._exit(code)
            pids.append(pid)
        print(*pids, flush=True)
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    # whoever started the tests in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        serve()
    else:
        run(sys.argv[1], int(sys.argv[2]))
