"""Trains on two ranks with engine=deepspeed and with engine=ddp, in one start, and saves the
results.

    torchrun --nproc-per-node 2 zero.py OUT

Rank 0 saves {scenario: [rank 0's, rank 1's]}; most scenarios hold the end of a run for "ddp" and
for each kind of ZeRO.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.toy import Line, fill, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError
from trainkit.optim import LAMB, AdEMAMix

OUT = sys.argv[1]
ENGINE = make_engine("ddp")
with ENGINE:
    SAMPLES = 8 * ENGINE.ranks.world_size  # two steps an epoch, or one of two microbatches
# else stage 3 keeps small weights whole
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "config": SPLIT_ALL},
    "stage 2, host": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, host": {
        "stage": 3,
        "config": SPLIT_ALL,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}


def engine(kind: str) -> Any:
    """A new engine of a kind."""
    return make_engine("ddp") if kind == "ddp" else make_engine("deepspeed", **KINDS[kind])


class Tied(nn.Module):
    """Layers of odd sizes; the first one's weight is the last one's too, one layer is frozen,
    and one has buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 7, bias=False), nn.BatchNorm1d(7)
        self.frozen, self.last = nn.Linear(7, 7), nn.Linear(7, 1)
        self.frozen.requires_grad_(False)
        self.again = nn.Linear(3, 7, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the answer."""
        return self.last(torch.tanh(self.frozen(self.norm(self.first(x)))) + 0.1 * self.again(x))


class Parts(Line):
    """Two groups of weights, and a weight of the Task itself,
    which its steps use outside of any module.
    """

    def __init__(self, make: Any, dim: int = 5) -> None:
        super().__init__()
        self.make, self.scale = make, nn.Parameter(torch.linspace(0.9, 1.1, dim))

    def make_model(self) -> nn.Module:
        """Return the layers."""
        return Tied()

    def forward(self, x: Tensor) -> Tensor:
        """Return the answer, scaled."""
        return self.model(x) * self.scale.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Use the Task's own weight before and after forward."""
        x, y = batch
        loss = functional.mse_loss(self(x * self.scale[0]), y) + 0.01 * self.scale.square().sum()
        return {"loss": loss, "more": x}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same."""
        x, y = batch
        self.log("val/loss", functional.mse_loss(self(x) * self.scale[1], y))

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the scenario, over two groups;
        the second has a rate of its own.
        """
        own = list(self.model.parameters())
        optimizer = self.make([{"params": own}, {"params": [self.scale], "lr": 0.01}])
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
                "interval": "step",
            }
        ]


class Plain(Parts):
    """Layers without batch norm, which needs two samples."""

    def make_model(self) -> nn.Module:
        """Return them."""
        model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
        fill(model)
        return model


def sgd(groups: Any) -> Any:
    """Plain SGD: a wrong factor of the gradient shows at once."""
    return torch.optim.SGD(groups, lr=0.05)


def adamw(groups: Any) -> Any:
    """AdamW."""
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def fit(
    kind: str,
    make: Any,
    folder: str,
    ckpt_path: str | None = None,
    *,
    of: Any = None,
    samples: int = SAMPLES,
    **settings: Any,
) -> dict[str, Any]:
    """Train; return the state of the Task, made whole again, and the values."""
    task = (of or Parts)(make)
    defaults: dict[str, Any] = {
        "lr_scaling": "none",
        "num_sanity_val_steps": 0,
        "max_epochs": 3,
        "callbacks": [ModelCheckpoint()],
    }
    run = quiet(Path(FOLDER) / folder, engine=engine(kind), **(defaults | settings))
    run.fit(task, loader(samples, shuffle=True), loader(samples), ckpt_path=ckpt_path)
    state = {name: value.clone() for name, value in task.state_dict().items()}
    return {"state": state, "metrics": dict(run.callback_metrics), "left": leftovers(task, run)}


def leftovers(task: Any, run: Any) -> list[str]:
    """What an engine left behind on the Task's modules and weights."""
    names = [
        name
        for module in task.modules()
        for name in vars(module)
        if name.startswith("ds_") or "forward_pre_hooks_always" in name
    ]
    names += [name for parameter in task.parameters() for name in vars(parameter)]
    names += [
        type(module._parameters).__name__
        for module in task.modules()
        if type(module._parameters) is not dict
    ]
    names += [name for name in ("training_step", "validation_step") if name in vars(task)]
    hooks = [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in task.modules()
    ]
    return names + ["hooks"] * sum(hooks)


def all_kinds(name: str, make: Any, **settings: Any) -> dict[str, Any]:
    """A run of each kind."""
    return {kind: fit(kind, make, f"{name} {kind}", **settings) for kind in ("ddp", *KINDS)}


def plain() -> dict[str, Any]:
    """Plain SGD."""
    return all_kinds("plain", sgd)


def empty() -> dict[str, Any]:
    """The last step has a single sample, so that two of three ranks have none;
    neither has the last round of validation.
    """
    return all_kinds("empty", sgd, of=Plain, samples=25)


def accumulated() -> dict[str, Any]:
    """AdamW, two microbatches a step, and a norm that clips each step."""
    return all_kinds(
        "accumulated", adamw, accumulate_grad_batches=2, gradient_clip_val=0.05, max_epochs=4
    )


def two_averages() -> dict[str, Any]:
    """AdEMAMix, whose slow average grows over six steps."""

    def make(groups: Any) -> Any:
        return AdEMAMix(groups, 0.02, t_alpha_beta3=6, weight_decay=0.1)

    kinds = ("ddp", "stage 1", "stage 2", "stage 2, host")
    return {kind: fit(kind, make, f"two averages {kind}") for kind in kinds}


def mixed() -> dict[str, Any]:
    """bfloat16 under autocast."""
    return all_kinds("mixed", sgd, precision="bf16-mixed")


def exchanged() -> dict[str, Any]:
    """Stopped inside the second epoch by one engine, and resumed by another."""
    results = {"whole": fit("ddp", adamw, "exchanged")}
    pairs = (
        [("ddp", kind) for kind in KINDS]
        + [(kind, "ddp") for kind in KINDS]
        + [("stage 3", "stage 1"), ("stage 2", "stage 3")]
    )
    for first, second in pairs:
        folder = f"exchanged {first} {second}"
        fit(first, adamw, folder, max_steps=3)
        results[f"{first} -> {second}"] = fit(second, adamw, folder, ckpt_path="last")
    return results


class Held(Callback):
    """Keeps how many numbers of the weights and of the optimizer's
    state this rank holds after the last step.
    """

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Count them."""
        self.weights = sum(tensor.numel() for tensor in trainer.engine.weights_here(task))
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.state = sum(
            value.numel() for state in states for value in state.values() if value.dim()
        )


def held() -> dict[str, Any]:
    """What a rank holds, by kind."""
    results = {}
    for kind in ("ddp", "stage 1", "stage 3"):
        callback = Held()
        fit(kind, adamw, f"held {kind}", callbacks=[callback], max_epochs=1)
        results[kind] = {"weights": callback.weights, "state": callback.state}
    return results


class Weighing(Parts):
    """Weighs its batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the weight of the batch too."""
        return super().training_step(batch, batch_idx) | {"num_samples": 3}


class Thawing(Parts):
    """Thaws a layer in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Thaw it."""
        if self.trainer.global_step == 1:
            self.model.frozen.requires_grad_(True)
        return super().training_step(batch, batch_idx)


def refused() -> dict[str, Any]:
    """What is found only in training, or by the engine of a run:
    the errors, and whether the weights stayed.
    """
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "num_samples": (Weighing(sgd), "stage 2", {}),
        "thawed": (Thawing(sgd), "stage 3", {}),
        "by tensor": (Parts(lambda groups: LAMB(groups, 0.1)), "stage 1", {}),
        "float64": (Parts(sgd).double(), "stage 1", {}),
        "precision": (Parts(sgd), "stage 1", {"precision": "16-mixed"}),
    }
    results = {}
    for name, (task, kind, settings) in cases.items():
        before = weights(task)
        try:
            quiet(Path(FOLDER) / name, engine=engine(kind), **settings).fit(task, loader(SAMPLES))
            results[name] = {"error": None}
        except TrainkitError as error:
            same = kind != "stage 3" and bool(torch.equal(weights(task), before))
            results[name] = {"error": f"{type(error).__name__}: {error}", "kept": same}
    return results


SCENARIOS = [plain, empty, accumulated, two_averages, mixed, exchanged, held, refused]

if __name__ == "__main__":
    results = {}
    with ENGINE, tempfile.TemporaryDirectory() as FOLDER:
        FOLDER = ENGINE.comm.broadcast_object(FOLDER)
        for run_scenario in SCENARIOS:
            if len(sys.argv) < 3 or run_scenario.__name__ in sys.argv[2:]:
                results[run_scenario.__name__] = ENGINE.comm.all_gather_object(run_scenario())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
