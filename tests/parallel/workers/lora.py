"""Trains adapters beside frozen layers, and resumes them.

    horovodrun -np N python lora.py OUT ENGINE     (or torchrun, or python)

Rank 0 saves {scenario: [each rank's result]}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.callbacks import LoRA, ModelCheckpoint
from trainkit.engine.select import make_engine

OUT, NAME = Path(sys.argv[1]), sys.argv[2]
SAMPLES, STEP, STEPS, BEFORE = 45, 12, 7, 3  # the last step of an epoch is short
WIDTH = 10
ADAPTED = {"target_modules": ["up", "down"], "r": 3, "lora_alpha": 5}
SCENARIOS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "whole": {"modules_to_save": ["last"], "use_rslora": True},
}


class Block(nn.Module):
    """A wide layer after a norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(trainkit.Task):
    """Three blocks between two layers, made once the engine is there."""

    def configure_model(self) -> None:
        """Make the layers."""
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"first": nn.Linear(6, WIDTH), "last": nn.Linear(WIDTH, 1)})
        self.model["blocks"] = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        features = self.model["blocks"](self.model["first"](batch[0]))
        return (self.model["last"](features) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        """Return SGD, whose result shows a wrong scale of the gradient."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Watch(trainkit.Callback):
    """Notes what has gradients, and what is summed over ranks."""

    def __init__(self) -> None:
        self.with_gradient: set[str] = set()
        self.summed: set[str] = set()

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Note them."""
        names = {p: name for name, p in task.named_parameters()}
        self.with_gradient |= {name for p, name in names.items() if p.grad is not None}
        if trainer.engine._reducer is not None:
            self.summed |= {names[p] for p in trainer.engine._reducer._bucket_of}


def whole(tensor: Any) -> Tensor:
    """Return a copy of all of a tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(name: str, folder: str, ckpt_path: str | None = None, steps: int = STEPS) -> Any:
    """Train a scenario, or on from its checkpoint."""
    inputs = torch.randn(
        SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    data = TensorDataset(inputs, (inputs.sum(1, keepdim=True) * 0.5).tanh())
    watch, task = Watch(), Deep()
    torch.manual_seed(5)
    saves = ModelCheckpoint(every_n_train_steps=BEFORE, save_top_k=-1, save_last=True)
    trainer = trainkit.Trainer(
        max_steps=steps,
        engine=make_engine(NAME),  # type: ignore[arg-type]
        global_batch_size=STEP,
        precision="64-true",
        lr_scaling="none",
        run_dir=str(OUT.parent / folder),
        callbacks=[LoRA(**ADAPTED, **SCENARIOS[name]), saves, watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(data, 2, shuffle=True), ckpt_path=ckpt_path)
    every = {key: whole(value) for key, value in task.named_parameters()}
    every |= {key: whole(value) for key, value in task.named_buffers()}
    saved = [*task.state_dict()]
    return {"every": every, "saved": saved, "grads": watch.with_gradient, "summed": watch.summed}


def run(name: str) -> dict[str, Any]:
    """Train to the end; train to the checkpoint; train on."""
    ended = train(name, f"{name}-whole")
    train(name, f"{name}-parts", steps=BEFORE)
    return {"ended": ended, "resumed": train(name, f"{name}-parts", "last")}


if __name__ == "__main__":
    results = {}
    ENGINE = make_engine(NAME)  # type: ignore[arg-type]
    with ENGINE:
        for scenario in SCENARIOS:
            results[scenario] = ENGINE.comm.all_gather_object(run(scenario))
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
