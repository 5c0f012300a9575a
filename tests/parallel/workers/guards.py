"""Runs, in one start of a launcher, the scenarios of the guards of a step and of exactness over
ranks; see runs.py.

    python guards.py OUT WIDTH, horovodrun -np WIDTH python guards.py OUT WIDTH, torchrun
    --nproc-per-node WIDTH guards.py ...

A single process accumulates what WIDTH ranks would take. The last rank is the one that things
happen to.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainkit
from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import DivergenceGuard
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError

OUT, WIDTH = sys.argv[1], int(sys.argv[2])
ENGINE = make_engine("auto")
with ENGINE:
    RANKS, RANK = ENGINE.ranks.world_size, ENGINE.ranks.rank
LAST = RANKS > 1 and RANK == RANKS - 1
SAMPLES = 8 * WIDTH + 3  # two full steps, and a short one in which some ranks have less or nothing


def trainer(**settings: Any) -> trainkit.Trainer:
    """A quiet trainer in float64; one process accumulates the ranks' batches."""
    if RANKS == 1 and "accumulate_grad_batches" not in settings:
        settings["accumulate_grad_batches"] = WIDTH
    defaults: dict[str, Any] = {
        "precision": "64-true",
        "lr_scaling": "none",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return quiet(FOLDER, **(defaults | settings))


class Tight(Line):
    """Has no memory for more than two samples on the last rank (or on the only one)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Fail after the forward was logged, in the backward's place."""
        self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        loss = super().training_step(batch, batch_idx)
        if (LAST or RANKS == 1) and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


class Explodes(torch.autograd.Function):
    """Runs out of memory in backward, when the sums of later layers are under way already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Pass on."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Fail for more than two samples."""
        if (LAST or RANKS == 1) and len(grad) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grad


class TightInBackward(Line):
    """Two layers, and memory that ends between their backwards."""

    def make_model(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's answer."""
        return self.model[1](Explodes.apply(self.model[0](x)))


def out_of_memory() -> dict[str, Any]:
    """One rank runs out of memory; all split."""
    run, task = trainer(halve_batch_on_oom=True, assert_no_sync=True), Tight(momentum=0.9)
    run.fit(task, loader(SAMPLES))
    return {"weights": weights(task), "seen": run.callback_metrics["seen"]}


def out_of_memory_in_backward() -> dict[str, Any]:
    """The same inside backward."""
    run, task = trainer(halve_batch_on_oom=True), TightInBackward(momentum=0.9)
    run.fit(task, loader(SAMPLES))
    return {"weights": weights(task)}


def roomy() -> dict[str, Any]:
    """The reference for both of them."""
    task, deep = Line(momentum=0.9), TightInBackward(momentum=0.9)
    trainer().fit(task, loader(SAMPLES))
    trainer(halve_batch_on_oom=True).fit(deep, loader(SAMPLES))
    return {"weights": weights(task)}


def error_of(task: Any, data: Any, val: Any = None, **settings: Any) -> dict[str, Any]:
    """Return how a run ends, and the weights it leaves."""
    try:
        trainer(**settings).fit(task, data, val)
    except TrainkitError as error:
        return {"error": f"{type(error).__name__}: {error}", "weights": weights(task)}
    return {"error": None, "weights": weights(task)}


def not_finite() -> dict[str, Any]:
    """One sample of the second step is poisoned."""
    x_NI, y_NO = rows(SAMPLES).tensors
    y_NO = y_NO.clone()
    y_NO[8 * WIDTH - 1] = float("nan")
    before = Line()
    trainer(max_steps=1).fit(before, loader(TensorDataset(x_NI, y_NO)))
    return error_of(Line(), loader(TensorDataset(x_NI, y_NO)), stop_on_nonfinite=True) | {
        "before": weights(before)
    }


class Flip(Callback):
    """Changes one weight of one rank by its last bit."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Do it in the second step."""
        if trainer.global_step == 2 and LAST:
            with torch.no_grad():
                weight = task.model.weight.view(-1)
                weight[1] = torch.nextafter(weight[1], weight[1] + 1)


def divergence() -> dict[str, Any]:
    """Differing bits are found at the next check; after a broadcast they are equal."""
    stopped = error_of(
        Line(momentum=0.9), loader(SAMPLES), callbacks=[Flip(), DivergenceGuard(every_n_steps=1)]
    )
    guard = DivergenceGuard(every_n_steps=1, action="repair")
    repaired = error_of(Line(momentum=0.9), loader(SAMPLES), callbacks=[Flip(), guard])
    plain = error_of(
        Line(momentum=0.9), loader(SAMPLES), callbacks=[DivergenceGuard(every_n_steps=1)]
    )
    return {"stopped": stopped, "repaired": repaired, "plain": plain, "repairs": guard.repairs}


class Scores(Line):
    """Logs a metric object beside the plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.order = torchmetrics.PearsonCorrCoef()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log both."""
        x, y = batch
        self.error(self(x), y)
        self.order.update(self(x)[:, 0], y[:, 0])
        self.log("object", self.error)
        self.log("order", self.order)
        self.log("plain", (self(x) - y).square().mean())


def metric_objects() -> dict[str, Any]:
    """Validation over uneven shares, and over fewer batches than ranks."""
    return {
        "many": trainer().validate(Scores(), loader(SAMPLES)),
        "few": trainer().validate(Scores(), loader(4)),
    }


def predictions() -> dict[str, Any]:
    """Batches of all ranks on the disk, in order."""
    folder = Path(FOLDER) / "predictions"
    task = Line()
    kept = trainer().predict(task, loader(SAMPLES), write_to=folder)
    return {
        "kept": torch.cat(kept or []),
        "read": torch.cat(list(trainkit.read_predictions(folder))),
    }


def accumulation_by_epoch() -> dict[str, Any]:
    """Twice the accumulation from the second epoch on, with the rate that goes with it."""
    task = Line(momentum=0.9)
    changes = {0: WIDTH // RANKS, 1: 2 * WIDTH // RANKS}
    settings = {
        "lr_scaling": "linear",
        "lr_reference_batch_size": 4 * WIDTH,
        "lr_momentum_correction": False,
    }
    trainer(accumulate_grad_batches=changes, lr_warmup_steps=2, **settings).fit(
        task, loader(SAMPLES)
    )
    return {"weights": weights(task)}


def overfit() -> dict[str, Any]:
    """A share of the data, again and again."""
    task = Line(momentum=0.9)
    trainer(overfit_batches=0.5).fit(task, loader(SAMPLES, shuffle=True))
    return {"weights": weights(task)}


class Normed(Line):
    """Two layers with batch norm between them."""

    def make_model(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def sync_batchnorm() -> dict[str, Any]:
    """Batch norm over the microbatches of all ranks,
    with a short last step that each rank has a part of.
    """
    task = Normed(momentum=0.9)
    samples, size = 8 * WIDTH + 3 * WIDTH, 4 * (WIDTH if RANKS == 1 else 1)
    run = trainer(sync_batchnorm=True, accumulate_grad_batches=1)
    run.fit(task, loader(samples, batch_size=size), loader(5))
    ends: dict[str, Any] = {"metrics": run.callback_metrics}
    ends["state"] = {name: value.double() for name, value in task.state_dict().items()}
    if RANKS > 1:
        ends["refused"] = error_of(Normed(), loader(8 * WIDTH + 1), sync_batchnorm=True)["error"]
        ends["together"] = error_of(
            Normed(), loader(8), sync_batchnorm=True, halve_batch_on_oom=True
        )["error"]
        trainer(sync_batchnorm=True).fit(Line(), loader(8 * WIDTH))  # there is none
    return ends


class Alone(Callback):
    """Gathers something on rank 0 alone, as in `if trainer.is_global_zero`."""

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        """Gather, while the others gather what was logged."""
        if trainer.is_global_zero:
            task.all_gather(torch.ones(2))


def called_alone() -> dict[str, Any]:
    """Rank 0 calls something that needs all ranks; torch matches what they send by its order."""
    if ENGINE.name != "ddp":
        return {}
    return error_of(Line(), loader(SAMPLES), callbacks=[Alone()], val=loader(5))


SCENARIOS = [
    called_alone,
    sync_batchnorm,
    out_of_memory,
    out_of_memory_in_backward,
    roomy,
    not_finite,
    divergence,
    metric_objects,
    predictions,
    accumulation_by_epoch,
    overfit,
]
with ENGINE:
    FOLDER = ENGINE.comm.broadcast_object(tempfile.mkdtemp())
results = {}
for scenario in SCENARIOS:
    own = scenario()
    with ENGINE:
        results[scenario.__name__] = ENGINE.comm.all_gather_object(own)
if RANK == 0:
    torch.save(results, OUT)
