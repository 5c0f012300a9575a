"""Runs averages of weights, optimizers of trainkit and unfreezing on several ranks, in one start of a launcher,
and saves the results.

    python averaging.py OUT
    horovodrun -np 2 python averaging.py OUT
    torchrun --nproc-per-node 2 averaging.py OUT

Results are as in scenarios.py: rank 0 saves {scenario: [rank 0's, rank 1's, ...]}.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.third_party_optimizers import InBytes, Lookahead
from tests.helpers.toy import Line, fill, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from trainkit.engine.select import make_engine
from trainkit.optim import LAMB, LARS, SOAP, Adafactor, AdEMAMix, Muon, decay_groups, schedule_free

OUT = sys.argv[1]
ENGINE = make_engine("auto")
with ENGINE:
    RANKS = ENGINE.ranks.world_size


class Parts(Line):
    """A backbone with batch norm, and a head; the optimizer is the scenario's."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.make = make or (
            lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
        )

    def make_model(self) -> nn.Module:
        """Return both."""
        model = nn.Sequential(
            nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )
        fill(model)
        return model

    def configure_optimizers(self) -> Any:
        """Return the optimizer with a rate that falls each step."""
        optimizer = self.make(decay_groups(self))
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
                "interval": "step",
            }
        ]


class Trained(Callback):
    """Keeps the weights of the last update."""

    found: Tensor

    def on_after_optimizer_step(self, trainer: Any, task: Any) -> None:
        """An update was made."""
        self.found = weights(task)


def fit(
    name: str, task: Any, callback: Any = None, ckpt_path: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Train in float64; one process accumulates the batches of two ranks."""
    accumulate = {"accumulate_grad_batches": 2} if RANKS == 1 else {}
    defaults: dict[str, Any] = {
        "precision": "64-true",
        "lr_scaling": "none",
        "num_sanity_val_steps": 0,
        "max_epochs": 4,
    }
    trained = Trained()
    callbacks = [trained, ModelCheckpoint(), *([callback] if callback else [])]
    run = quiet(Path(FOLDER) / name, callbacks=callbacks, **(accumulate | defaults | settings))
    run.fit(task, loader(22, shuffle=True), loader(5), ckpt_path=ckpt_path)
    state = {name: value.double() for name, value in task.state_dict().items()}
    return {"state": state, "trained": trained.found, "metrics": dict(run.callback_metrics)}


def scenario(
    name: str, make: Any = lambda: None, stop_at: int = 5, optimizer: Any = None
) -> dict[str, Any]:
    """A whole run, and one that was stopped inside an epoch and resumed in new objects."""
    whole = fit(name, Parts(optimizer), make())
    fit(f"{name} parts", Parts(optimizer), make(), max_steps=stop_at)
    return {
        "whole": whole,
        "parts": fit(f"{name} parts", Parts(optimizer), make(), ckpt_path="last"),
    }


def ema() -> dict[str, Any]:
    """EMA over weights and statistics."""
    return scenario("ema", lambda: EMA(0.8))


def swa() -> dict[str, Any]:
    """SWA with the statistics of all ranks' data; stopped inside its second epoch."""
    return scenario("swa", lambda: StochasticWeightAveraging(0.03, 2, 2), stop_at=10)


def finetuning() -> dict[str, Any]:
    """A run with a backbone that is unfrozen, stopped after that."""
    return scenario(
        "finetuning",
        lambda: BackboneFinetuning(1, ["model.0", "model.1"], train_bn=False),
        stop_at=5,
    )


def lars() -> dict[str, Any]:
    """LARS under two parameter groups."""
    return {
        "whole": fit(
            "lars",
            Parts(lambda groups: LARS(groups, 1.0, weight_decay=0.01, trust_coefficient=0.02)),
        )
    }


def lamb() -> dict[str, Any]:
    """LAMB under two parameter groups."""
    return {"whole": fit("lamb", Parts(lambda groups: LAMB(groups, 0.02)))}


def muon() -> dict[str, Any]:
    """Muon for the first layer, AdamW for the rest."""
    return scenario("muon", optimizer=lambda groups: Muon(groups, 0.02))


def adafactor() -> dict[str, Any]:
    """Adafactor under two parameter groups."""
    return scenario("adafactor", optimizer=lambda groups: Adafactor(groups, 0.05))


def ademamix() -> dict[str, Any]:
    """AdEMAMix whose slow average grows; stopped while it does."""
    return scenario("ademamix", optimizer=lambda groups: AdEMAMix(groups, 0.02, t_alpha_beta3=9))


def soap() -> dict[str, Any]:
    """SOAP with new bases in each second step."""
    return scenario("soap", optimizer=lambda groups: SOAP(groups, 0.02, precondition_frequency=2))


def averaged() -> dict[str, Any]:
    """AdamW without a schedule, which is evaluated at averages."""
    return scenario("averaged", optimizer=lambda groups: schedule_free(groups, 0.05))


def wrapper() -> dict[str, Any]:
    """An optimizer around another, whose state has a form of its own."""

    def make(groups: Any) -> Lookahead:
        return Lookahead(torch.optim.SGD(groups, lr=0.05, momentum=0.9), own_form=True)

    return scenario("wrapper", optimizer=make)


def in_bytes() -> dict[str, Any]:
    """Momenta in tensors of a class of their own."""
    return scenario("in_bytes", optimizer=InBytes)


SCENARIOS = [
    ema,
    swa,
    finetuning,
    lars,
    lamb,
    muon,
    adafactor,
    ademamix,
    soap,
    averaged,
    wrapper,
    in_bytes,
]

if __name__ == "__main__":
    results = {}
    with ENGINE, tempfile.TemporaryDirectory() as FOLDER:
        FOLDER = ENGINE.comm.broadcast_object(FOLDER)
        for run_scenario in SCENARIOS:
            results[run_scenario.__name__] = ENGINE.comm.all_gather_object(run_scenario())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
