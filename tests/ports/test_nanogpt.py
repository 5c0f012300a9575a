"""nanoGPT's training loop, and the same loop on trainkit.Loop:
the losses agree, on one rank and on two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from tests.helpers.threads import World

block_size, batch_size, gradient_accumulation_steps = 16, 4, 4
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 4, 16
weight_decay, grad_clip, eval_interval, eval_iters = 0.1, 1.0, 8, 3
text = ("to be or not to be, that is the question: " * 40).encode()
data = torch.tensor(list(text), dtype=torch.long)
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


class GPT(nn.Module):
    """A small causal transformer over bytes; the output layer shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, 32), nn.Embedding(block_size, 32)
        layer = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 128, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [B, T, V], loss)."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.lm_head(self.ln_f(self.h(x, mask=mask, is_causal=True)))
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with weight decay for matrices and embeddings only."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": nodecay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_batch(split: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `batch_size` random pieces of a text, and the pieces one byte later."""
    ix = torch.randint(len(split) - block_size, (batch_size,), generator=generator)
    x = torch.stack([split[i : i + block_size] for i in ix])
    y = torch.stack([split[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it: int) -> float:
    """Linear warm-up, then a cosine down to min_lr."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@functools.cache
def new_model() -> GPT:
    """Return the model before training."""
    torch.manual_seed(1337)
    return GPT().double()  # in float32 Adam makes rounding visible


def as_nanogpt_writes_it() -> tuple[list[float], list[float], GPT]:
    """Return the losses of each microbatch, the validation losses, and the model."""
    model = copy.deepcopy(new_model())
    optimizer = model.configure_optimizers()
    generator = torch.Generator().manual_seed(1)
    losses, val_losses = [], []
    for iter_num in range(max_iters):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        for _ in range(gradient_accumulation_steps):
            X, Y = get_batch(train_data, generator)
            _, loss = model(X, Y)
            losses.append(loss.item())
            (loss / gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (iter_num + 1) % eval_interval == 0:
            model.eval()
            with torch.no_grad():
                found = [model(*batch)[1].item() for batch in val_batches()]
            model.train()
            val_losses.append(sum(found) / len(found))
    return losses, val_losses, model


class Batches:
    """The same batches as a stream, of one epoch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield get_batch(train_data, generator)


def val_batches() -> list[tuple[Tensor, Tensor]]:
    """Return the validation batches."""
    generator = torch.Generator().manual_seed(2)
    return [get_batch(val_data, generator) for _ in range(eval_iters)]


def with_trainkit(
    run_dir: Path, engine: Any = "auto", ranks: int = 1
) -> tuple[list[float], list[float], GPT]:
    """Return the same from a loop of one's own on trainkit; rank 0's losses."""
    model = copy.deepcopy(new_model())
    optimizer = model.configure_optimizers()
    lr = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: get_lr(it) / learning_rate)
    losses, val_losses = [], []
    with trainkit.Loop(
        model,
        optimizer,
        Batches(),
        val_batches(),
        lr_scheduler={"scheduler": lr, "interval": "step"},
        engine=engine,
        max_steps=max_iters,
        precision="64-true",
        accumulate_grad_batches=gradient_accumulation_steps // ranks,
        lr_scaling="none",
        gradient_clip_val=grad_clip,
        val_check_interval=eval_interval,
        run_dir=str(run_dir),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    ) as loop:
        for _ in loop.epochs():
            for X, Y in loop.batches():
                _, loss = model(X, Y)
                losses.append(loss.item())
                loop.backward(loss)
            for X, Y in loop.validation():
                loop.log("val/loss", model(X, Y)[1])
            with contextlib.suppress(KeyError):
                val_losses.append(loop.trainer.callback_metrics["val/loss"])
    return losses, val_losses, model


def weights(model: GPT) -> Tensor:
    """Return all weights as a vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_losses_are_nanogpts(tmp_path: Path) -> None:
    """Each microbatch's, and the validation's, to the rounding of a mean in float64."""
    losses, val_losses, model = as_nanogpt_writes_it()
    found, val_found, own = with_trainkit(tmp_path)
    assert found == pytest.approx(losses, abs=1e-10)
    assert val_found == pytest.approx(val_losses, abs=1e-10)
    assert len(val_found) == 2
    assert torch.allclose(weights(own), weights(model), atol=1e-10)
    assert losses[-1] < losses[0] - 1


def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    """The stream is split: the same four microbatches of a step, two on each rank."""
    lone = with_trainkit(tmp_path / "one")[2]
    for _, _, model in World(2).run(lambda engine: with_trainkit(tmp_path / "two", engine, 2)):
        assert torch.allclose(weights(model), weights(lone), atol=1e-10)
