"""A Task with every part that parallel training can get wrong, and the bugs that do.

    python bugs.py FOLDER single
    torchrun --nproc-per-node 2 bugs.py FOLDER ranks

The first records each variant in one process, the second each bug on two ranks, beside the record
of its variant. The bugs are of the kinds that TTrace collects from Megatron (arXiv 2506.09280).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.engine import base
from trainkit.engine.select import make_engine
from trainkit.extensions.check_engine.recorder import EngineRecorder
from trainkit.optim.clipping import clip

ERROR, STEPS, DISTURBED, SAMPLES = 2.0**-23, 2, 2, 4
TOKENS, LENGTH, WIDTH = 11, 6, 8


class Norm(nn.LayerNorm):
    """A layer norm; with `own_half`, of a sequence that the ranks of a tensor group have split."""

    own_half: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input; gradients of this rank's half alone."""
        if self.own_half is None:
            return super().forward(x)
        weight, bias = self.weight.detach(), self.bias.detach()
        halves = list(x.chunk(2, dim=1))
        shape = self.normalized_shape
        for i, half in enumerate(halves):
            own = (self.weight, self.bias) if i == self.own_half else (weight, bias)
            halves[i] = functional.layer_norm(half, shape, *own, self.eps)
        return torch.cat(halves, dim=1)


class Mask(nn.Module):
    """Drops an eighth of the elements, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the masked input."""
        return x * (torch.rand(x.shape, generator=self.generator) > 1 / 8)


class Scale(nn.Module):
    """Divides by the root of the mean square over the batch, or notes it alone."""

    def __init__(self, uses_batch: bool) -> None:
        super().__init__()
        self.uses_batch = uses_batch
        self.sums = False
        self.register_buffer("square", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled input."""
        square = x.square().mean()
        if not self.uses_batch:
            if self.sums:
                self.square.copy_(0.9 * self.square + 0.1 * square.detach())
            return x
        return x / square.sqrt()


class BatchScaleNorm(Scale):
    """A batch norm of the user's own."""


class Small(trainkit.Task):
    """Tokens under a tied head."""

    def __init__(self, variant: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.variant = variant
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm, self.mask = Norm(WIDTH), Mask()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = BatchScaleNorm(True) if variant == "batch" else Scale(False)
        self.scale.sums = variant == "buffer"
        self.batch_norm = nn.BatchNorm1d(LENGTH) if variant == "statistics" else nn.Identity()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if variant != "untied":
            self.head.weight = self.embedding.weight
        self.rank, self.world = 0, 1

    def setup(self, stage: str) -> None:
        """Learn which rank this is."""
        self.rank, self.world = self.trainer.engine.ranks.rank, self.trainer.world_size

    def parallelize(self, mesh: Any) -> Any:
        """Name the pair."""
        return {"up": "colwise", "down": "rowwise"}

    def embed(self, x: Tensor) -> Tensor:
        """Return the embedding."""
        return self.embedding(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.embed(x)
        h = self.mask(self.norm(h)) if self.variant == "mask" else self.norm(h)
        h = self.batch_norm(self.scale(h + self.down(self.up(h).tanh())))
        return self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        """Return SGD, which shows a wrong scale."""
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


# -- bugs -------------------------------------------------------------------------------------------


class NoForwardSum(Small):
    """The row-parallel layer returns a rank's part of the sum."""

    def parallelize(self, mesh: Any) -> Any:
        """Leave the all-reduce out."""
        style = RowwiseParallel(output_layouts=Partial())
        parallelize_module(self.down, mesh, style, src_data_rank=None)
        return {"up": "colwise"}


class NoNormSum(Small):
    """The norm's gradient is that of a rank's half of the sequence."""

    def setup(self, stage: str) -> None:
        """Split the sequence."""
        super().setup(stage)
        self.norm.own_half = self.rank


class OtherMask(Small):
    """The ranks of a tensor group draw different masks."""

    def setup(self, stage: str) -> None:
        """Seed by rank."""
        super().setup(stage)
        self.mask.generator.manual_seed(3 + self.rank)


class WrongOffset(Small):
    """Each rank takes the other's rows of a layer."""

    def parallelize(self, mesh: Any) -> Any:
        """Turn the rows."""
        with torch.no_grad():
            self.up.weight.copy_(self.up.weight.roll(8, 0))
        return super().parallelize(mesh)


class Untied(Small):
    """The head gets a weight of its own."""

    def setup(self, stage: str) -> None:
        """Copy it."""
        super().setup(stage)
        if self.world > 1:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class NoEmbeddingGradient(Small):
    """The embedding is detached."""

    def embed(self, x: Tensor) -> Tensor:
        """Detach it."""
        return super().embed(x).detach()


class LossByRanks(Small):
    """The loss is multiplied by the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Multiply."""
        return super().training_step(batch, batch_idx) * self.world


def scaled(factor: Callable[[int], float]) -> type[Small]:
    """Return a Task that multiplies its gradients by a function of the number of ranks."""

    class Scaled(Small):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad *= factor(self.world)

    return Scaled


class NoBroadcast(Small):
    """Rank 1 fills a weight itself."""

    def on_train_start(self) -> None:
        """Fill it."""
        with torch.no_grad():
            if self.rank:
                self.down.weight.normal_()


class NoGradientSum(Small):
    """A layer's gradient stays a rank's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep it."""
        loss = super().training_step(batch, batch_idx)
        if not hasattr(self, "handle"):
            self.handle = self.down.bias.register_hook(lambda grad: setattr(self, "own", grad))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Put it back."""
        self.down.bias.grad = self.own.clone()


class OtherRate(Small):
    """An optimizer of another rate for one layer."""

    def configure_optimizers(self) -> Any:
        """Part the parameters."""
        down = list(self.down.parameters())
        others = [p for p in self.parameters() if all(p is not each for each in down)]
        groups = [{"params": others}, {"params": down, "lr": 0.5 / self.world}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


class Forgotten(Small):
    """An optimizer without one layer."""

    def configure_optimizers(self) -> Any:
        """Leave it out."""
        own = [p for name, p in self.named_parameters() if not name.startswith("up.")]
        return torch.optim.SGD(own, lr=0.5, momentum=0.9)


def clip_by_own_norm(optimizers: Any, value: float | None, algorithm: str = "norm") -> None:
    """Clip by the norm of what this rank holds."""
    held = [p.grad.to_local() for o in optimizers for g in o.param_groups for p in g["params"]]
    norm = torch.stack([each.norm() for each in held]).norm()
    for each in held:
        each.mul_(min(1.0, (value or 1.0) / float(norm)))


TENSOR: dict[str, Any] = {"tensor": 2}


@dataclass(frozen=True)
class Seeded:
    """A bug, or none, on an engine.

    Attributes:
        make: makes the Task.
        variant: of the Task, and the name of its record in one process.
        engine: its name.
        options: of it.
        settings: of the Trainer.
        clip: in place of the engine's.
    """

    make: Callable[[str], Small]
    variant: str = "plain"
    engine: str = "fsdp"
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    clip: Any = clip


SYNC: dict[str, Any] = {"sync_batchnorm": True}
SEEDED = {
    "none tensor": Seeded(Small, options=TENSOR),
    "none fsdp": Seeded(Small),
    "none ddp": Seeded(Small, engine="ddp"),
    "none mask": Seeded(Small, "mask", options=TENSOR),
    "none clip": Seeded(Small, "clip"),
    "none statistics": Seeded(Small, "statistics", "ddp"),
    "none sync": Seeded(Small, "sync", "ddp", settings=SYNC),
    "forward sum": Seeded(NoForwardSum, options=TENSOR),
    "norm's sum": Seeded(NoNormSum, options=TENSOR),
    "mask": Seeded(OtherMask, "mask", options=TENSOR),
    "offset": Seeded(WrongOffset, options=TENSOR),
    "untied": Seeded(Untied, engine="ddp"),
    "embedding": Seeded(NoEmbeddingGradient, "untied"),
    "loss by ranks": Seeded(LossByRanks, engine="ddp"),
    "summed": Seeded(scaled(float), engine="ddp"),
    "averaged twice": Seeded(scaled(lambda world: 1 / world)),
    "accumulation": Seeded(scaled(lambda world: 1 / 3), engine="ddp"),
    "broadcast": Seeded(NoBroadcast, engine="ddp"),
    "gradient's sum": Seeded(NoGradientSum, engine="ddp"),
    "rate": Seeded(OtherRate, engine="ddp"),
    "forgotten": Seeded(Forgotten, engine="ddp"),
    "own norm": Seeded(Small, "clip", clip=clip_by_own_norm),
    "batch norm": Seeded(Small, "batch", "ddp", settings=SYNC),
    "buffer": Seeded(Small, "buffer", "ddp"),
}
VARIANTS = sorted({seeded.variant for seeded in SEEDED.values()})
WHOLE = ("batch", "sync")  # one process takes the samples of all ranks at once


def fit(
    seeded: Seeded, engine: Any, folder: Path, batch_size: int = SAMPLES // 2, **recorder: Any
) -> None:
    """Train and record."""
    variant = "statistics" if seeded.variant == "sync" else seeded.variant
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, TOKENS, (2, 64, LENGTH), generator=generator)
    base.clip = seeded.clip
    trainer = trainkit.Trainer(
        engine=engine,
        run_dir=str(folder.with_name(f"{folder.name}-run")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=STEPS,
        global_batch_size=SAMPLES,
        lr_scaling="none",
        gradient_clip_val=0.1 if seeded.variant == "clip" else None,
        callbacks=[EngineRecorder(str(folder), STEPS, **recorder)],
        **seeded.settings,
    )
    trainer.fit(seeded.make(variant), DataLoader(TensorDataset(*data), batch_size, shuffle=True))


def alone(folder: Path) -> None:
    """Record each variant in one process, and disturbed."""
    for variant in VARIANTS:
        size = SAMPLES if variant in WHOLE else SAMPLES // 2
        for i in range(DISTURBED + 1):
            name = f"disturbed-{i}" if i else "alone"
            disturbed = {"disturb": i, "size": ERROR} if i else {}
            fit(Seeded(Small, variant), "single", folder / variant / name, size, **disturbed)


def on_ranks(folder: Path) -> None:
    """Record each bug."""
    with make_engine("ddp") as engine:
        for name, seeded in SEEDED.items():
            reference = str(folder / seeded.variant / "alone")
            made = make_engine(seeded.engine, **seeded.options)
            fit(seeded, made, folder / "bugs" / name, reference=reference)
        engine.comm.barrier()


if __name__ == "__main__":
    {"single": alone, "ranks": on_ranks}[sys.argv[2]](Path(sys.argv[1]))
