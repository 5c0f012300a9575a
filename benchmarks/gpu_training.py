"""The trainings of gpu.py: by hand, and by trainkit with the same settings, block by block in one
process.

Both: bf16 autocast, channels_last, fused optimizer (by hand asked for, by trainkit chosen),
gradients set to None, cudnn.benchmark, the same compile mode. trainkit also keeps the mean of the
loss, as its recipe does; the loop by hand reads no loss at all.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.data import QUIET
from recipes.gpt2 import GPT2
from recipes.image_classifier import ImageClassifier
from recipes.language_model import LanguageModel
from trainkit import Callback, Task, Trainer

SMOOTHING = 0.1


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        name: of it.
        make: makes it.
        optimizer: makes its optimizer.
        flop: of an image, forward and backward.
        batch: images of a step.
        image: pixels of a side.
        block: steps of a block.
        blocks: that count, of each contender.
    """

    name: str
    make: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    flop: float
    batch: int
    image: int
    block: int
    blocks: int

    def task(self) -> Task:
        """Return it as a Task of the recipes."""
        return ImageClassifier(self.make(), self.optimizer, label_smoothing=SMOOTHING)

    def loss(self, forward: Callable[[Tensor], Tensor], *batch: Tensor) -> Tensor:
        """Return the loss of a batch, by hand."""
        return cross_entropy(forward(batch[0]), batch[1], label_smoothing=SMOOTHING)

    def fed(self, batch: Any) -> Any:
        """Return a batch as the Task takes it."""
        return batch

    def images(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return a batch of noise on the device."""
        images = torch.randn(self.batch, 3, self.image, self.image, device=device)
        labels = torch.randint(4, (self.batch,), device=device)
        return images.to(memory_format=torch.channels_last), labels


@dataclass(frozen=True)
class Text(Model):
    """A language model. `image` is the number of its tokens, `flop` that of one token."""

    vocab_size: int = 50257

    def task(self) -> Task:
        """See Model."""
        return LanguageModel(self.make(), self.optimizer, no_weight_decay=[])

    def loss(self, forward: Callable[[Tensor], Tensor], *batch: Tensor) -> Tensor:
        """See Model."""
        logits = forward(batch[0][:, :-1])
        return cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def fed(self, batch: Any) -> Any:
        """See Model."""
        return batch[0]

    def images(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return a batch of tokens [B, T + 1], drawn at random."""
        shape = (self.batch, self.image + 1)
        return (torch.randint(self.vocab_size, shape, device=device),)


def flop_of_token(parameters: int, depth: int, width: int, context: int) -> float:
    """Return the FLOP of a token, forward and backward (Chowdhery et al. 2022, appendix B)."""
    return 6.0 * parameters + 12 * depth * width * context


_SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-5)
_ADAMW = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
RESNET = Model("ResNet-50", torchvision.models.resnet50, _SGD, 24.3e9, 256, 224, 20, 6)
VIT = Model("ViT-B/16", torchvision.models.vit_b_16, _ADAMW, 105.2e9, 256, 224, 8, 5)
# Its embedding and its head are one; the positions' is not multiplied by.
GPT = Text("GPT-2 124M", GPT2, _ADAMW, flop_of_token(123_653_376, 12, 768, 1024), 16, 1024, 8, 5)
TINY_GPT = Text(
    "GPT-2 124M (tiny stand-in)",
    partial(GPT2, 64, 16, 32, 1, 2),
    _ADAMW,
    flop_of_token(123_653_376, 12, 768, 1024),
    2,
    16,
    2,
    2,
    vocab_size=64,
)
# To see on a CPU that the script runs.
_TINY_VIT = partial(
    torchvision.models.VisionTransformer,
    image_size=32,
    patch_size=16,
    num_layers=1,
    num_heads=2,
    hidden_dim=32,
    mlp_dim=64,
)
TINY = (
    Model("ResNet-50 (tiny stand-in)", torchvision.models.resnet18, _SGD, 24.3e9, 2, 32, 2, 2),
    Model("ViT-B/16 (tiny stand-in)", _TINY_VIT, _ADAMW, 105.2e9, 2, 32, 2, 2),
)


def synchronize(device: torch.device) -> float:
    """Wait for the device; return the time afterwards."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class ByHand:
    """A training loop, written out."""

    def __init__(self, model: Model, device: torch.device, mode: str | None) -> None:
        self.device, self.kind = device, model
        self.model = model.make().to(device, memory_format=torch.channels_last)
        self.optimizer = model.optimizer(self.model.parameters(), fused=True)
        self.forward: Any = self.model if mode is None else torch.compile(self.model, mode=mode)

    def step(self, *batch: Tensor) -> None:
        """Take one."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.kind.loss(self.forward, *batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, batch: tuple[Tensor, ...], steps: int) -> float:
        """Take some, and return the seconds of one."""
        before = synchronize(self.device)
        for _ in range(steps):
            self.step(*batch)
        return (synchronize(self.device) - before) / steps


class Turns(Callback):
    """After each block of trainkit's steps the loop by hand takes as many;
    both are timed, the first ones are left out.
    """

    def __init__(self, by_hand: ByHand, batch: tuple[Tensor, ...], block: int) -> None:
        self.by_hand, self.batch, self.block = by_hand, batch, block
        self.ours: list[list[float]] = []
        self.hand: list[list[float]] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Start the clock."""
        self.before = synchronize(self.by_hand.device)

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Record a block, and let the other one run."""
        if trainer.global_step % self.block:
            return
        taken = (synchronize(self.by_hand.device) - self.before) / self.block
        other = self.by_hand.seconds(self.batch, self.block)
        if trainer.global_step > self.block:
            self.ours.append([taken])
            self.hand.append([other])
        self.before = synchronize(self.by_hand.device)


@dataclass
class Fit:
    """A training with trainkit.

    Attributes:
        model: what is trained.
        device: where.
        mode: of torch.compile; None: not compiled.
        engine: trainkit's.
        settings: more of the Trainer.
        precision: the Trainer's.
    """

    model: Model
    device: torch.device
    mode: str | None = None
    engine: Any = "single"
    settings: dict[str, Any] = field(default_factory=dict)
    precision: Any = "bf16-mixed"

    def __call__(self, batches: Any, callbacks: Iterable[Callback] = (), **data: Any) -> None:
        """Train an epoch on batches, or on a `datamodule=`."""
        task = self.model.task()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                max_epochs=1,
                engine=self.engine,
                precision=self.precision,
                channels_last=not isinstance(self.model, Text),
                compile=False if self.mode is None else self.mode,
                callbacks=list(callbacks),
                log_every_n_steps=10**6,
                run_dir=folder,
                **QUIET,
                **self.settings,
            )
            feed = None if batches is None else [self.model.fed(batch) for batch in batches]
            trainer.fit(task, feed, **data)


def in_blocks(
    model: Model, device: torch.device, mode: str | None, precision: str = "bf16-mixed"
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of a step, block by block, of trainkit and of the loop by hand, which is in
    bf16 whatever the precision.
    """
    batch = model.images(device)
    turns = Turns(ByHand(model, device, mode), batch, model.block)
    Fit(model, device, mode, precision=precision)(
        [batch] * (model.block * (model.blocks + 1)), [turns]
    )
    return turns.ours, turns.hand


def forget(device: torch.device) -> None:
    """Free the memory of the training before."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
