"""Runs the scenarios of a whole run on several ranks, in one start of a launcher, and saves the
result of each.

    python runs.py OUT
    horovodrun -np 2 python runs.py OUT
    torchrun --nproc-per-node 2 runs.py OUT

Results are as in scenarios.py: rank 0 saves {scenario: [rank 0's, rank 1's, ...]}.
"""

from __future__ import annotations

import importlib
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

from tests.helpers.toy import Line, Net, loader, quiet, rows, weights
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.checkpoint import store
from trainkit.data.streams import sharded
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError

OUT = sys.argv[1]
ENGINE = make_engine("auto")
with ENGINE:
    RANKS, RANK = ENGINE.ranks.world_size, ENGINE.ranks.rank


def trainer(name: str, **settings: Any) -> Any:
    """A quiet trainer with a folder of its own, in float64;
    one process accumulates the batches of two ranks.
    """
    accumulate = {"accumulate_grad_batches": 2} if RANKS == 1 else {}
    defaults: dict[str, Any] = {
        "precision": "64-true",
        "lr_scaling": "none",
        "num_sanity_val_steps": 0,
    }
    return quiet(Path(FOLDER) / name, **(accumulate | defaults | settings))


class Scheduled(Net):
    """Dropout, batch norm, momentum and a rate that moves each step."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        """Return SGD with a falling rate."""
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def resumed() -> dict[str, Any]:
    """Stopped inside an epoch and resumed: each rank has its own dropout."""
    ends = {}
    for name, steps in (("whole", (8,)), ("parts", (3, 8))):
        for stop in steps:
            task = Scheduled()
            run = trainer(
                f"resumed {name}", max_steps=stop, lr_warmup_steps=6, enable_checkpointing=True
            )
            run.fit(
                task,
                loader(24, shuffle=True),
                loader(5),
                ckpt_path="last" if stop == 8 and name == "parts" else None,
            )
        ends[name] = {key: value.double() for key, value in task.state_dict().items()}
        ends[f"{name} metrics"] = run.callback_metrics
    return ends


class Tokens(Line):
    """Weighs its batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean over tokens, and their number."""
        tokens = 1 + (10 * batch[0][:, :1].abs()).floor()
        loss = ((self(batch[0]) - batch[1]).square() * tokens).sum() / tokens.sum()
        return {"loss": loss, "num_samples": tokens.sum()}


def resumed_without_a_sample() -> dict[str, Any]:
    """Resumed at a step in which all ranks but the first have no sample,
    by a task that weighs its batches.
    """
    for stop, ckpt_path in ((2, None), (3, "last")):
        task = Tokens()
        run = trainer("tokens", max_steps=stop, enable_checkpointing=True)
        run.fit(task, loader(17), ckpt_path=ckpt_path)
    whole = Tokens()
    trainer("tokens whole", max_steps=3).fit(whole, loader(17))
    return {"weights": weights(task), "whole": weights(whole), "samples": run.state.samples_seen}


def a_single_sample() -> dict[str, Any]:
    """A first step of one sample, and a validation of one: all ranks but the first have none."""
    task = Tokens()
    run = trainer("single sample", limit_train_batches=0.05, enable_checkpointing=True)
    run.fit(task, loader(20), loader(1))
    return {
        "weights": weights(task),
        "metrics": run.callback_metrics,
        "samples": run.state.samples_seen,
    }


def drawn() -> dict[str, Any]:
    """A user's own sampler with different draws on each rank gives one order for all."""
    seen: list[float] = []

    class Look(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    task = Look()
    generator = torch.Generator().manual_seed(RANK)
    sampler = WeightedRandomSampler([1.0, 3.0] * 10, num_samples=17, generator=generator)
    trainer("drawn", max_epochs=2).fit(task, loader(20, sampler=sampler))
    return {"weights": weights(task), "seen": seen}


def full_disk() -> dict[str, Any]:
    """Rank 0 cannot write: the ranks stay together, and no older checkpoint is lost."""
    real = store.write
    written: list[str] = []

    def failing(folder: Path, *args: Any) -> None:
        written.append(folder.name)
        if len(written) > 1:
            raise OSError("No space left on device")
        real(folder, *args)

    store.write = failing
    task = Line()
    keeper = ModelCheckpoint(monitor="val/loss", every_n_train_steps=1, every_n_epochs=1)
    run = trainer("full disk", max_epochs=2, callbacks=keeper)
    run.fit(task, loader(20), loader(5))
    store.write = real
    folder = run.run_dir / "checkpoints"
    names = sorted(path.name for path in folder.iterdir()) if RANK == 0 else []
    return {
        "weights": weights(task),
        "written": written,
        "names": names,
        "last": (folder / "last").resolve().name,
    }


def stopped() -> dict[str, Any]:
    """All ranks stop at the same step, since the value that they look at is the same."""
    task = Line(lr=0.0)
    run = trainer("stopped", max_epochs=9, callbacks=EarlyStopping("val/loss", patience=2))
    run.fit(task, loader(20), loader(5))
    return {"weights": weights(task), "steps": run.global_step, "reason": run.state.stop_reason}


def sized_streams() -> dict[str, Any]:
    """Lists of batches of different lengths on each rank, under a schedule over the whole run."""
    x_NI, y_NO = rows(20).tensors
    batches = [[x_NI[i : i + 2], y_NO[i : i + 2]] for i in range(0, 20, 2)]
    own = sharded(batches if RANKS == 1 else batches[:7] if RANK == 0 else batches[7:])

    class Cosine(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.planned = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.planned)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    task = Cosine()
    run = trainer("sized streams", max_epochs=2)
    run.fit(task, own, sharded([[x_NI[:3], y_NO[:3]]] if RANK == 0 else []))
    return {
        "weights": weights(task),
        "planned": task.planned,
        "steps": run.global_step,
        "metrics": run.callback_metrics,
    }


def refused() -> dict[str, Any]:
    """An error that only rank 0 detects ends all ranks with the same error."""
    messages = []
    for ckpt_path in ("last", "nowhere"):
        try:
            trainer("refused", max_steps=1).fit(Line(), loader(20), ckpt_path=ckpt_path)
        except TrainkitError as error:
            messages.append(f"{type(error).__name__}: {error}".replace(FOLDER, "here"))
    return {"messages": messages}


def refused_state() -> dict[str, Any]:
    """A checkpoint whose optimizer lacks a state that this one reads: rank 0 alone holds the states."""

    class Adam(Line):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), **self.sgd)

    trainer("refused state", max_steps=1, enable_checkpointing=True).fit(Adam(), loader(20))
    try:
        trainer("refused state", max_steps=2).fit(Adam(amsgrad=True), loader(20), ckpt_path="last")
    except TrainkitError as error:
        return {"message": str(error)}
    return {"message": "none"}


def wrapped() -> dict[str, Any]:
    """An optimizer that Horovod's own script would use, and a model that DDP's would."""
    is_horovod = type(ENGINE).__name__ == "HorovodEngine"

    class Wrapped(Line):
        def __init__(self) -> None:
            super().__init__()
            if torch.distributed.is_initialized():
                self.model = nn.parallel.DistributedDataParallel(self.model)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if not is_horovod:
                return optimizer
            hvd: Any = importlib.import_module("horovod.torch")
            return hvd.DistributedOptimizer(optimizer, self.named_parameters())

    try:
        trainer("wrapped", max_steps=1).fit(Wrapped(), loader(20))
    except TrainkitError as error:
        return {"message": str(error)}
    return {"message": "none"}


def sum_on_its_way() -> dict[str, Any]:
    """Sums that were started, rank 1's a while later,
    with other collectives between the start and the wait.
    """
    sums, others = [], []
    for i in range(5):
        if RANK == 1:
            time.sleep(0.01)
        wait = ENGINE.comm.start_sum(10 * i + RANK + 1)
        others.append(ENGINE.comm.all_reduce(torch.tensor([1.0 + RANK])).item())
        others.append(ENGINE.comm.broadcast_object(f"{i} from rank {RANK}"))
        ENGINE.comm.barrier()
        sums.append(wait())
    return {"sums": sums, "others": others}


def waits() -> dict[str, Any]:
    """The first rank waits half a second for the last one, in a sum and in an exchange of objects;
    how often it sleeps meanwhile.
    """
    sleeps = []
    for wait in (
        lambda: ENGINE.comm.all_reduce(torch.ones(1)),
        lambda: ENGINE.comm.all_gather_object(RANK),
    ):
        ENGINE.comm.barrier()
        if RANK == 1:
            time.sleep(0.5)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        wait()
        sleeps.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
    return {"sleeps": sleeps}


SCENARIOS = [
    resumed,
    resumed_without_a_sample,
    a_single_sample,
    drawn,
    full_disk,
    stopped,
    sized_streams,
    refused,
    refused_state,
    wrapped,
    sum_on_its_way,
    waits,
]

if __name__ == "__main__":
    results = {}
    with ENGINE, tempfile.TemporaryDirectory() as FOLDER:
        FOLDER = ENGINE.comm.broadcast_object(FOLDER)
        for scenario in SCENARIOS:
            results[scenario.__name__] = ENGINE.comm.all_gather_object(scenario())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
