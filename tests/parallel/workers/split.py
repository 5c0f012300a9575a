"""Trains on ranks that hold parts of the weights, and resumes from what other engines and numbers
of ranks have saved.

    torchrun --nproc-per-node N split.py OUT ENGINE OPTIONS FROM SCENARIOS

OPTIONS are the engine's, in JSON. SCENARIOS are names with commas. FROM is "-", or the folder of an earlier start's OUT: each
scenario then resumes from its checkpoint. A step has 24 samples on any number of ranks. Rank 0
saves {scenario: [rank 0's result, ...]}.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.parallel.workers.experts import Mixed
from trainkit.callbacks import EMA, DivergenceGuard, ModelCheckpoint
from trainkit.engine.select import make_engine
from trainkit.optim import LAMB, LARS, Adafactor, AdEMAMix, Muon, decay_groups, schedule_free

OUT, NAME, OPTIONS, FROM = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
WIDTH = 63  # which no number of ranks divides
# of an epoch and of a step; steps before the checkpoint, and in all
SAMPLES, STEP, BEFORE, AFTER = 49, 24, 4, 7
MICROBATCHES = 2  # of a step, on any number of ranks
VALIDATED = 13  # samples of a batch: four batches, the last one smaller
TASKS: list[trainkit.Task] = []  # which live until the process ends, as the globals of a script do
# The last step of an epoch has one sample: all ranks but those of one tensor group borrow one.


class Block(nn.Module):
    """A wide layer after a norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Deep(trainkit.Task):
    """Four blocks, a buffer, and a first layer that shares its weight with the last."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make
        self.gathered: list[bool] = []  # before each microbatch
        if type(self) is Deep:
            self.make_layers()

    def make_layers(self) -> None:
        """Those of __init__ are each rank's own;
        configure_model's come from rank 0's random numbers.
        """
        torch.manual_seed(3 + (ENGINE.ranks.rank if type(self) is Deep else 0))
        self.first, self.blocks = nn.Linear(6, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(6, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a sample."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.last.weight).mean(1, keepdim=True) + self.shift

    def parallelize(self, mesh: Any) -> dict[str, str]:
        """Split the wide layers over tensor groups."""
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error; note whether a block's weights are there already."""
        if self.training:
            own = [block.norm.weight for block in self.blocks if not block.norm.weight.is_meta]
            self.gathered.append(not isinstance(own[0], DTensor))
        return (self(batch[0]) - batch[1]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        """Return the scenario's; the buffer is each rank's own until the engine sends rank 0's."""
        self.shift += ENGINE.ranks.rank
        return self.make(self.parameters())


class Late(Deep):
    """The same, made once the engine is there; some weights are drawn again."""

    def configure_model(self) -> None:
        """Make the layers."""
        self.make_layers()
        for block in self.blocks:
            nn.init.trunc_normal_(block.up.weight, std=0.1)


class Clipped(Mixed):
    """Experts whose Task clips the gradients itself."""

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **more: Any) -> None:
        """Clip their norm, which no rank has alone, and log one of a weight."""
        self.clip_gradients(optimizer, gradient_clip_val=0.05)
        self.log("norm", self.first.weight.grad.norm())


def mixed(make: Callable[[Any], Any]) -> Mixed:
    """Experts; of torch before 2.14, FSDP2's ranks must use the same weights."""
    skips = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    return Clipped(make, WIDTH, 3 + ENGINE.ranks.rank, skips)


def several(task: Any) -> list[torch.optim.Optimizer]:
    """An optimizer of each kind that looks at whole weights, and one that does not, each for a
    part of the layers: one of each kind of split. Some stages of a pipeline have none of it.
    """
    a, b, c, d = task.blocks
    rest = [*task.first.parameters(), *a.norm.parameters(), *b.norm.parameters()]
    return [
        LARS([*a.up.parameters(), *b.down.parameters()], lr=0.5, momentum=0.9),
        LAMB([*a.down.parameters(), *b.up.parameters()], lr=0.01),
        Adafactor(c.parameters(), lr=0.02, weight_decay=0.1),
        Muon(decay_groups(d), lr=0.01, adamw=[]),
        AdEMAMix(rest, lr=0.01, t_alpha_beta3=9),
    ]


def note_threads() -> None:
    """Write the names of the threads with which this process ends."""
    names = [
        task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    ]
    OUT.with_name(f"threads_of_rank_{os.environ.get('RANK', '0')}").write_text(" ".join(names))


def whole(tensor: Any) -> Any:
    """Return all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def settings_of(name: str, *callbacks: Any) -> dict[str, Any]:
    """Return the settings of a scenario, whose folder holds the checkpoint to resume from."""
    folder = OUT.parent / name
    if FROM != "-" and ENGINE.ranks.is_main:
        shutil.copytree(Path(FROM) / name, folder, symlinks=True)
    ENGINE.comm.barrier()
    all_callbacks = [
        ModelCheckpoint(every_n_epochs=1, save_last=True, save_top_k=-1),
        *callbacks,
    ]
    if ENGINE.ranks.world_size > 1:
        all_callbacks.append(DivergenceGuard(every_n_steps=2))
    return {
        "max_steps": BEFORE if FROM == "-" else AFTER,
        "engine": make_engine(NAME, **OPTIONS),  # type: ignore[arg-type]
        "global_batch_size": STEP,
        "precision": "64-true",
        "lr_scaling": "none",
        "run_dir": str(folder),
        "callbacks": all_callbacks,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def loaders() -> tuple[Any, Any]:
    """Return the data of training and of validation."""
    inputs = torch.randn(
        SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    data = TensorDataset(inputs, (inputs.sum(1, keepdim=True) * 0.5).tanh())
    loader = DataLoader(data, STEP // MICROBATCHES // ENGINE.ranks.data_size, shuffle=True)
    return loader, DataLoader(data, VALIDATED)


def weights_of(module: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return the whole weights of a module, and how many numbers this rank holds of them."""
    # a weight without memory is another pipeline stage's
    state = {
        key: whole(value).clone() for key, value in module.state_dict().items() if not value.is_meta
    }
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel()
        for p in module.parameters()
        if not p.is_meta
    )
    return state, held


def train_by_hand(name: str) -> dict[str, Any]:
    """Train in a loop of one's own, whose optimizer was made of the whole weights."""
    torch.manual_seed(3 + ENGINE.ranks.rank)
    model = nn.Sequential(nn.Linear(6, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    groups = [{"params": [p], "lr": 0.02 + 0.001 * i} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    ckpt_path = None if FROM == "-" else "last"
    settings = settings_of(name)
    with trainkit.Loop(model, optimizer, *loaders(), ckpt_path=ckpt_path, **settings) as loop:
        for _ in loop.epochs():
            for x, y in loop.batches():
                loop.backward((model(x) - y).pow(2).mean())
            for x, y in loop.validation():
                loop.log("val/loss", (model(x) - y).pow(2).mean())
    state, held = weights_of(model)
    value = loop.history[-1]["val/loss"]
    return {"state": state, "held": held, "value": value}


def train(
    name: str, make: Callable[[Any], Any], kind: Callable[..., Any] = Deep, **settings: Any
) -> dict[str, Any]:
    """Train a scenario to its checkpoint, or on from it."""
    own = settings_of(name, *settings.pop("callbacks", []))
    trainer = trainkit.Trainer(**own, **settings)
    task = kind(make)
    TASKS.append(task)
    loader, validated = loaders()
    trainer.fit(task, loader, validated, ckpt_path=None if FROM == "-" else "last")
    state, held = weights_of(task)
    draw = torch.rand(2).tolist()
    value = trainer.validate(task, validated)["val/loss"]
    return {
        "state": state,
        "held": held,
        "value": value,
        "draw": draw,
        "gathered": task.gathered,
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    # plain SGD shows a wrong scale of the gradient, which Adam would hide
    "sgd": lambda: train("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.02)),
    "adamw": lambda: train(
        "adamw",
        lambda parameters: torch.optim.AdamW(
            [{"params": [p], "lr": 1e-3 + 1e-4 * i} for i, p in enumerate(parameters)]
        ),
        gradient_clip_val=0.05,
        activation_checkpointing=True,
    ),
    "late": lambda: train(
        "late",
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        kind=Late,
        callbacks=[EMA(0.5)],
    ),
    "several": lambda: train("several", lambda _: several(TASKS[-1])),
    "experts": lambda: train(
        "experts",
        # without momentum: an expert that a whole step leaves out has no gradient in one process,
        # and one of zeros under FSDP2
        lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        kind=mixed,
        activation_checkpointing=True,
    ),
    "loop": lambda: train_by_hand("loop"),
    "averaged": lambda: train("averaged", lambda parameters: schedule_free(parameters, lr=0.01)),
}

if __name__ == "__main__":
    atexit.register(note_threads)  # before the engine's, so it runs after it
    results = {}
    ENGINE = make_engine(NAME, **OPTIONS)  # type: ignore[arg-type]
    with ENGINE:
        for scenario in sys.argv[5].split(","):
            results[scenario] = ENGINE.comm.all_gather_object(SCENARIOS[scenario]())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
