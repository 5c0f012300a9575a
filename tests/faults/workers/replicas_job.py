"""What the ranks of test_elastic_fsdp.py run: replicas of split weights, with a count of each sample.

replicas_job.py RUN_DIR JSON       of what is not as in _DEFAULTS

The model is split (engine=single: it is not). A parameter counts the samples: its gradient is minus
each sample's share of a step, and its rate is the step's number of samples, so that a step adds one
to each of its samples. While there are fewer ranks than "waits_for" steps take longer, so that a new
replica can join in time. "dies" is [rank, step]: it is killed in the midst of that step's backward;
with "host_dies" it kills all processes of its host, the copy server's too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from trainkit.api.view import RunView, elastic_of
from trainkit.callbacks import EMA, Elastic, FaultInjection, Goodput, ModelCheckpoint, Watchdog
from trainkit.cli.guard import fail
from trainkit.device.shards import whole_of
from trainkit.engine.select import make_engine
from trainkit.errors import JobEnded, TrainkitError
from trainkit.launch.environment import read_launcher
from trainkit.launch.network import SECRET
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer

SAMPLES, STEP = 96, 8  # samples of an epoch and of a step
_PATIENCE = 6
_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_DEFAULTS: dict[str, Any] = {
    "engine": "fsdp",
    "options": {"replicas": 2},
    "faults": [],
    "commit": 3,
    "epochs": 4,
    "pace_s": 0.05,
    "waits_for": 4,
    "trainer": {},
    "optimizer": "SGD",
    "width": 8,
    "auto": False,
    "microbatch": 2,
    "ema": False,
    "stall_s": 60,
    "dtype": "float64",
    "dies": None,
    "host_dies": False,
    "copies": 0,
    "checkpoints": True,
}


class Counted(Task):
    """Three layers, and a count of each sample."""

    def __init__(
        self, optimizer: str, width: int, dtype: torch.dtype, dies: list[int] | None
    ) -> None:
        super().__init__()
        self.optimizer, self.dies, self.kill = optimizer, dies, kill_rank
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width)]
            layers += [nn.Tanh(), nn.Linear(width, 1)]
            self.model = nn.Sequential(*layers).to(dtype)
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, with the counts."""
        x, y, ids = batch
        x = x.to(self.model[0].weight.dtype)
        hidden = self.model[:2](x)
        if [self.trainer.global_rank, self.trainer.global_step] == self.dies:
            hidden.register_hook(lambda _: self.kill(self.trainer))
        loss = functional.mse_loss(self.model[2:](hidden).to(y.dtype), y)
        self.log("train/loss", loss)
        self.log("train/x", x.mean(), on_step=False, on_epoch=True)
        count = self.seen[ids].mean()
        return loss - count + count.detach()

    def configure_optimizers(self) -> Any:
        """Return an optimizer with a state for the weights, and a plain sum for the counts."""
        weights, counts = list(self.model.parameters()), [self.seen]
        if self.optimizer == "SGD":
            groups: list[dict[str, Any]] = [
                {"params": weights, "lr": 0.05, "momentum": 0.9},
                {"params": counts, "lr": float(STEP), "momentum": 0.0},
            ]
            return torch.optim.SGD(groups, lr=0.05)
        return torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(counts, lr=float(STEP))


def kill_rank(trainer: RunView) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_host(trainer: RunView) -> None:
    """Kill all processes of this host at once, in the first generation of ranks; and spoil all
    checkpoints.
    """
    if os.environ["HOROVOD_RENDEZVOUS_SCOPE"] != "g1.":
        return
    for manifest in trainer.run_dir.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    own = [f"{name}={os.environ[name]}" for name in ("HOROVOD_HOSTNAME", SECRET)]
    there = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if set(own) <= set(environ.read_text(errors="replace").split("\0")):
                there.append(int(environ.parent.name))
    for pid in sorted(there, key=os.getpid().__eq__):  # itself last
        os.kill(pid, signal.SIGKILL)


class Journal(Callback):
    """A line for each step of each process, and the pace."""

    def __init__(self, run_dir: Path, pace_s: float, waits_for: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / f"journal-{os.getpid()}.jsonl").open("a")
        self._pace_s, self._waits_for = pace_s, waits_for

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Write it down before it counts."""
        elastic: Any = elastic_of(trainer.callbacks)
        if elastic is not None and elastic.copies:
            elastic._copies.wait()  # so that the next is made when it is due
        line = {"step": trainer.global_step, "rank": trainer.global_rank}
        line |= {"ranks": trainer.world_size, "t": time.monotonic()}
        line |= {"generation": int(os.environ.get("HOROVOD_RENDEZVOUS_SCOPE", "g0.")[1:-1])}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        is_short = trainer.world_size < self._waits_for
        time.sleep(self._pace_s * (_PATIENCE if is_short else 1))


def samples() -> TensorDataset:
    """Return x, y and the number of each sample, always the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    return TensorDataset(x, y, torch.arange(SAMPLES))


def main() -> None:
    """Fit, and write down how it ended."""
    run_dir, given = Path(sys.argv[1]), _DEFAULTS | json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dtype, is_elastic = _DTYPES[given["dtype"]], given["engine"] != "single"
    task = Counted(given["optimizer"], given["width"], dtype, given["dies"])
    if given["host_dies"]:
        task.kill = kill_host
    callbacks: list[Callback] = [FaultInjection(given["faults"])] if given["faults"] else []
    callbacks += [Goodput(), Journal(run_dir, given["pace_s"], given["waits_for"])]
    callbacks += [EMA(decay=0.9)] * given["ema"]
    if is_elastic:
        callbacks += [
            Elastic(commit_every_n_steps=given["commit"], copies=given["copies"]),
            Watchdog(stall_timeout_s=given["stall_s"]),
        ]
        callbacks += [ModelCheckpoint(every_n_epochs=1)] * given["checkpoints"]
    settings = {"precision": "64-true", "lr_scaling": "none"} | given["trainer"]
    trainer = Trainer(
        engine=make_engine(given["engine"], **given["options"]),
        max_epochs=given["epochs"],
        global_batch_size=STEP,
        run_dir=str(run_dir),
        callbacks=callbacks,
        logger=[CSVLogger()],
        enable_checkpointing=is_elastic and given["checkpoints"],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1000,
        **settings,
    )
    data = DataLoader(samples(), batch_size=given["microbatch"], shuffle=True)
    trainer.fit(task, data, ckpt_path="auto" if given["auto"] else None)
    weights = torch.cat([whole_of(p.detach()).flatten() for p in task.model.parameters()])
    end = {"step": trainer.global_step, "seen": whole_of(task.seen.detach()).tolist()}
    end |= {"weights": weights.tolist()}
    (run_dir / f"end-{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    try:
        main()
    except JobEnded as error:
        sys.exit(fail(error, read_launcher(), "" if error.is_reported else str(error), 1))
    except TrainkitError as error:
        sys.exit(fail(error, read_launcher(), str(error), error.exit_code))
    except Exception as error:
        sys.exit(fail(error, read_launcher(), traceback.format_exc(), 1))
