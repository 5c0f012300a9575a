"""Runs, in one start of a launcher, fits in which the last rank computes wrong numbers; see runs.py.

python audit.py OUT, horovodrun -np 2 python audit.py OUT, torchrun --nproc-per-node 3 audit.py OUT
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn

from tests.helpers.toy import Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import Audit, FaultInjection
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError

OUT = sys.argv[1]
ENGINE = make_engine("auto")
with ENGINE:
    RANKS, RANK = ENGINE.ranks.world_size, ENGINE.ranks.rank
SAMPLES = 10 * RANKS  # two full steps, and one of half the size


class Drawing(Net):
    """Draws random numbers, has batch norm, counts its steps, and fills a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=0.3)
        self.calls, self.mean = 0, torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Change the batch in place, as a normalisation does."""
        self.calls += 1
        batch[0].mul_(1.0 + 0.01 * (self.calls % 3))
        x = self.dropout(self.norm(batch[0])) + 0.1 * torch.randn_like(batch[0])
        loss = super().training_step([x, batch[1]], batch_idx)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Once(Callback):
    """Makes rank 0's second step wrong, once, at the first layer's output."""

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Flip a bit of one output."""
        if trainer.global_step == 1 and trainer.global_rank == 0:
            layer = task.model[0]

            def flip(module: Any, args: Any, output: Any) -> Any:
                handle.remove()
                return output + 1.0

            handle = layer.register_forward_hook(flip)


def fit(folder: Path, *callbacks: Callback, **settings: Any) -> dict[str, Any]:
    """Train four steps; return the error's text, the weights, and the epoch's metric."""
    torch.manual_seed(1)
    task, error, metric = Drawing(), None, None
    trainer = quiet(folder, callbacks=[*callbacks], num_sanity_val_steps=0, **settings)
    try:
        metric = trainer.fit(task, loader(SAMPLES))[-1]["mean"]
    except TrainkitError as raised:
        error = str(raised)
    return {"error": error, "weights": weights(task), "metric": metric, "calls": task.calls}


def flip(of: str, **more: Any) -> FaultInjection:
    """Flip a bit on the last rank after the first step."""
    return FaultInjection([{"do": "flip", "of": of, "rank": RANKS - 1, "step": 1, **more}])


SCENARIOS: dict[str, tuple[list[Callback], dict[str, Any]]] = {
    "plain": ([], {}),
    "audited": ([Audit(every_n_steps=1)], {}),
    "accumulated": ([Audit(every_n_steps=1)], {"accumulate_grad_batches": 2}),
    "activation": ([flip("activation"), Audit(every_n_steps=2)], {}),
    "gradient": ([flip("gradient"), Audit(every_n_steps=2)], {}),
    "weight": ([flip("weight", bit=3), Audit(every_n_steps=2)], {}),
    "once": ([Once(), Audit(every_n_steps=2)], {}),
    "warned": ([flip("weight"), Audit(every_n_steps=2, action="warn")], {}),
}
with ENGINE:
    FOLDER = Path(ENGINE.comm.broadcast_object(tempfile.mkdtemp()))
results = {}
for name, (callbacks, settings) in SCENARIOS.items():
    own = fit(FOLDER / name, *callbacks, max_epochs=2, **settings)
    with ENGINE:
        results[name] = ENGINE.comm.all_gather_object(own)
if RANK == 0:
    torch.save(results, OUT)
