"""Trains under each kind of communication on several ranks, in one start of a launcher, and saves
the results.

    horovodrun -np 2 python communication.py OUT [FOLDER]
    torchrun --nproc-per-node 2 communication.py OUT [FOLDER]

FOLDER is that of an earlier start, at another number of ranks, whose checkpoints are resumed.
Results are as in scenarios.py: rank 0 saves {scenario: [rank 0's, rank 1's, ...]}.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trainkit
from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import DivergenceGuard
from trainkit.engine.select import make_engine
from trainkit.errors import DivergenceError, TrainkitError

OUT = Path(sys.argv[1])
EARLIER = Path(sys.argv[2]) if len(sys.argv) > 2 else None
FULL = {"rank": 99, "start_after_steps": 0, "min_compression": 0.0}
KINDS = {
    "powersgd": trainkit.PowerSGD(rank=2, start_after_steps=2, min_compression=1.0),
    "local": trainkit.LocalSGD(every_n_steps=3),
    "postlocal": trainkit.LocalSGD(every_n_steps=3, start_after_steps=3),
    "diloco": trainkit.DiLoCo(every_n_steps=4, outer_lr=0.7, outer_momentum=0.6),
    "fragments": trainkit.DiLoCo(every_n_steps=4, fragments=3),
}
STOP, END = 5, 13


class Deep(Line):
    """Three layers of different shapes, one of them tall; AdamW on request."""

    def __init__(self, adam: bool = False, lr: float = 0.05, **sgd: Any) -> None:
        super().__init__(lr, **sgd)
        self.adam = adam

    def make_model(self) -> nn.Module:
        """Return the model: 3 numbers in, 1 out."""
        return nn.Sequential(
            nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def configure_optimizers(self) -> Any:
        """Return SGD, or AdamW."""
        return (
            torch.optim.AdamW(self.parameters(), lr=0.01)
            if self.adam
            else super().configure_optimizers()
        )


class Weighted(Deep):
    """Weighs its batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean over tokens, and their number."""
        tokens = 1 + (10 * batch[0][:, :1].abs()).floor()
        loss = ((self(batch[0]) - batch[1]).square() * tokens).sum() / tokens.sum()
        return {"loss": loss, "num_samples": tokens.sum()}


class Idle(Deep):
    """A layer that no rank uses, one that rank 0 uses alone,
    and one that all use in odd batches only.
    """

    def make_model(self) -> nn.Module:
        """Return the layers."""
        return nn.ModuleDict({name: nn.Linear(3, 4) for name in ("all", "first", "never", "odd")})

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layers in use."""
        first = self.trainer.global_rank == 0
        used = ["all", *["first"] * first, *["odd"] * (self.trainer.global_step % 2)]
        return sum(self.model[name](x).tanh().sum(1, keepdim=True) for name in used)


class Seen(Callback):
    """Records the weights after each step, and whether all ranks evaluate the same ones."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.evaluated: list[Tensor] = []

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Record."""
        self.steps.append(weights(task))

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        """Record."""
        self.evaluated.append(weights(task))


def train(
    name: str, task: Any, communication: Any = "exact", samples: int = 40, **settings: Any
) -> Any:
    """Train, in float64; return the trainer."""
    defaults: dict[str, Any] = {
        "precision": "64-true",
        "lr_scaling": "none",
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    ckpt_path, val = settings.pop("ckpt_path", None), settings.pop("val", None)
    run = quiet(OUT.parent / name, communication=communication, **(defaults | settings))
    run.fit(task, loader(samples, shuffle=True), val, ckpt_path=ckpt_path)
    return run


def exact_sums() -> dict[str, Any]:
    """Full-rank factors and one step alone, beside exact sums;
    the last step of an epoch is short.
    """
    results = {}
    for name, communication, model, samples in (
        ("exact", "exact", Deep, 37),
        ("full rank", trainkit.PowerSGD(**FULL), Deep, 37),
        ("mean of each step", trainkit.LocalSGD(every_n_steps=1), Deep, 37),
        (
            "outer step of each step",
            trainkit.DiLoCo(every_n_steps=1, outer_lr=1.0, outer_momentum=0.0),
            Deep,
            37,
        ),
        ("weighted, exact", "exact", Weighted, 40),
        ("weighted, full rank", trainkit.PowerSGD(**FULL), Weighted, 40),
        ("weighted, mean of each step", trainkit.LocalSGD(every_n_steps=1), Weighted, 40),
    ):
        task = model()
        train(f"exact {name}", task, communication, samples, accumulate_grad_batches=2)
        results[name] = weights(task)
    return results


def unused() -> dict[str, Any]:
    """Layers without gradients on some ranks or on all,
    under exact sums and under full-rank factors.
    """
    results = {}
    for name, communication in (("exact", "exact"), ("full rank", trainkit.PowerSGD(**FULL))):
        task = Idle(momentum=0.9, weight_decay=0.1)
        train(f"unused {name}", task, communication)
        results[name] = {key: value.clone() for key, value in task.state_dict().items()}
    return results


def approximate() -> dict[str, Any]:
    """What each kind does in the steps of a run, with a validation inside the epoch."""
    results = {}
    for name, communication in {"exact": "exact", **KINDS}.items():
        seen, task = Seen(), Deep()
        train(
            f"steps {name}",
            task,
            communication,
            48,
            callbacks=[seen],
            val=loader(8),
            val_check_interval=3,
            max_epochs=3,
        )
        results[name] = {"steps": seen.steps, "evaluated": seen.evaluated, "end": weights(task)}
    return results


def resumed() -> dict[str, Any]:
    """Each kind, stopped inside a round and resumed, beside a run that never stopped;
    AdamW has state of its own.
    """
    results = {}
    for name, communication in KINDS.items():
        ends, seen = [], []
        for folder, path in (
            ("whole", None),
            ("parts", None),
            ("parts", checkpoint_of(OUT.parent, name)),
        ):
            task = Deep(adam=True)
            seen.append(Seen())
            is_killed = folder == "parts" and path is None
            settings = {
                "callbacks": [seen[-1], *[Killed()] * is_killed],
                "max_steps": END,
                "max_epochs": 9,
            }
            with contextlib.suppress(TrainkitError) if is_killed else contextlib.nullcontext():
                train(
                    f"resumed {name} {folder}", task, communication, 80, **settings, ckpt_path=path
                )
            ends.append(weights(task))
        results[name] = {
            "whole": seen[0].steps[STOP:],
            "parts": seen[2].steps,
            "ends": (ends[0], ends[2]),
        }
    return results


class Killed(Callback):
    """Ends the run without a word to the engine once a checkpoint is written, as a kill would."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """End it."""
        if trainer.global_step == STOP:
            trainer.save_checkpoint(trainer.run_dir / "checkpoints" / "killed")
            trainer.engine.comm.barrier()
            raise TrainkitError("killed")


def checkpoint_of(folder: Path, kind: str) -> str:
    """Return the checkpoint at which the run of a kind was killed."""
    return str(folder / f"resumed {kind} parts" / "checkpoints" / "killed")


def changed() -> dict[str, Any]:
    """Checkpoints of another number of ranks, resumed:
    weights before the first step, and what was held back.
    """
    assert EARLIER is not None
    results = {}
    for name, communication in KINDS.items():
        task, start = Deep(adam=True), Start()
        settings = {
            "callbacks": [start],
            "max_steps": END,
            "max_epochs": 9,
            "ckpt_path": checkpoint_of(EARLIER, name),
        }
        train(f"changed {name}", task, communication, 80, **settings)
        results[name] = {"start": start.own, "weights": start.weights, "end": weights(task)}
    task = Deep(adam=True)
    train(
        "changed to exact",
        task,
        "exact",
        80,
        max_steps=END,
        max_epochs=9,
        ckpt_path=checkpoint_of(EARLIER, "diloco"),
    )
    return results


class Start(Callback):
    """Records what a rank begins with."""

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Record."""
        self.weights = weights(task)
        self.own = copy.deepcopy(trainer.engine.approximation.own_state())


def guarded() -> dict[str, Any]:
    """The guard is content with ranks that step alone,
    and finds one whose shared weights have changed.
    """

    class Damage(Callback):
        def on_train_step_end(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 5 and trainer.global_rank == 1:
                next(iter(trainer.engine.approximation._shared.values())).view(-1)[0] += 1e-9

    results = {}
    for name, damage in (("sound", []), ("damaged", [Damage()])):
        try:
            callbacks = [*damage, DivergenceGuard(every_n_steps=1)]
            train(f"guarded {name}", Deep(adam=True), KINDS["diloco"], callbacks=callbacks)
            results[name] = ""
        except DivergenceError as error:
            results[name] = str(error)
    return results


SCENARIOS = [changed] if EARLIER else [exact_sums, unused, approximate, resumed, guarded]

if __name__ == "__main__":
    with make_engine("auto") as engine:
        results = {}
        for scenario in SCENARIOS:
            own = scenario()
            results[scenario.__name__] = engine.comm.all_gather_object(own)
        if engine.ranks.is_main:
            torch.save(results, OUT)
