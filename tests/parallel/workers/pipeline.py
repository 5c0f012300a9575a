"""What the stages of a pipeline read, count, draw, hand on and refuse, beside one process.

    torchrun --nproc-per-node 4 pipeline.py OUT fsdp '{"pipeline":2}'
    python pipeline.py OUT single '{}'

Rank 0 saves {scenario: [rank 0's result, ...]}; if a model has two ranks, these train by another
schedule then, whose results are beside the scenarios by its name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import trainkit
from recipes.bert import BERT
from recipes.language_model import MaskedLanguageModel
from tests.parallel.workers.trainers import exact_trainer
from trainkit.callbacks import EMA, ModelCheckpoint, ThroughputMonitor
from trainkit.engine.select import make_engine

OUT, NAME, OPTIONS = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
# a step has 12 samples: 3 microbatches of 2 on each of 2 data ranks, or 6 in one process; the last
# one of an epoch has 3: one microbatch on each
WIDTH, SAMPLES, STEP = 6, 27, 12
INTERLEAVED = "interleaved_1f1b"
WORDS, TOKENS = 11, 7


class Rows(Dataset[Any]):
    """Numbered samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, x.sum().tanh(), index


class Block(nn.Module):
    """Takes its input, and that of all blocks, with a gate of the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, first: Tensor, *, gate: Tensor) -> Tensor:
        """Return as many features."""
        if self.training:
            self.calls += 1
        return self.dropout(x + self.layer(x).tanh() * gate) + 0.1 * first


class Chain(trainkit.Task):
    """Four blocks, a first layer and a head, and a weight of the Task itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList()
        self.blocks.extend(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[list[int]] = []
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return a number a sample."""
        gate = (x > 0).to(x.dtype)
        first = x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x, first, gate=gate)
        return self.head(x).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Weigh each sample by its number, and log."""
        x, y, number = batch
        self.seen.append(number.tolist())
        self.drawn.append(float(torch.rand(())))
        weight = number + 1.0
        loss = ((self(x) - y).square() * weight).sum() / weight.sum()
        self.log("train/samples", float(len(x)), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("train/number", number.double().mean(), on_epoch=True, on_step=False)
        return {"loss": loss, "num_samples": weight.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log sums and means."""
        self.log("val/loss", (self(batch[0]) - batch[1]).square().mean())
        self.log("val/samples", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the samples' numbers and values."""
        return [*zip(batch[2].tolist(), self(batch[0]).tolist(), strict=True)]

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Normed(Chain):
    """With batch norms in the first stage, one of them without weights, a weight that no step uses,
    and one that one step leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.norm = nn.BatchNorm1d(WIDTH)
        self.plain = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks, self.head = blocks, head
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number a sample."""
        gate = (x > 0).to(x.dtype)
        first = x = self.norm(self.first(x)) * self.scale
        for place, block in enumerate(self.blocks):
            x = block(x, first, gate=gate)
            if place == 0:
                x = self.plain(x)
        return self.head(x).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Leave a weight out in one step."""
        outputs = super().training_step(batch, batch_idx)
        if self.global_step != 1:
            outputs["loss"] = outputs["loss"] * self.sometimes
        return outputs

    def configure_optimizers(self) -> Any:
        """Return AdamW, which moves a weight with a gradient of zeros too."""
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class Skips(Chain):
    """Skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return nothing."""
        super().training_step(batch, batch_idx)


class Beside(Chain):
    """Uses what the first stage has beside what it hands on."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a number a sample."""
        return super().forward(x) + self.first(x).mean(1)


class Early(Chain):
    """Ends a step before the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss without them."""
        return self.scale.sum() * batch[1].mean()


class Padded(MaskedLanguageModel):
    """BERT on texts of several lengths: blocks get the mask of padding beside what is handed on."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__(
            BERT(WORDS, TOKENS, width=8, depth=4, heads=2, dropout=0.0), torch.optim.AdamW
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits; 0 is padding."""
        return self.model(tokens_BT, tokens_BT != 0)  # type: ignore[no-any-return]


class Texts(Dataset[Any]):
    """Numbered texts, of which each third token is to be predicted."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (TOKENS,), generator=drawn)
        tokens[2 + index % (TOKENS - 1) :] = 0
        labels = torch.full((TOKENS,), -100)
        labels[index % 3 :: 3] = tokens[index % 3 :: 3]
        return tokens.clone(), labels.where(tokens > 0, -100)


def trainer(name: str, **settings: Any) -> trainkit.Trainer:
    """Return a trainer of a scenario's folder."""
    settings = {"global_batch_size": STEP, "max_epochs": 2, "gradient_clip_val": 0.5, **settings}
    return exact_trainer((NAME, OPTIONS), OUT.parent / name, **settings)


def data(shuffle: bool = False) -> DataLoader[Any]:
    """Return the samples in batches of 2."""
    return DataLoader(Rows(), 2, shuffle=shuffle)


def state_of(task: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds, whole."""
    here = {name: value for name, value in task.state_dict().items() if not value.is_meta}
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().clone()
        for name, value in here.items()
    }


def counted() -> dict[str, Any]:
    """Train, and predict."""
    task, run = Chain(), trainer("counted")
    run.fit(task, data(shuffle=True), data())
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    predicted = run.predict(task, data())
    return {
        "state": state_of(task),
        "seen": task.seen,
        "drawn": task.drawn,
        "values": values,
        "predicted": [pair for batch in predicted or [] for pair in batch],
    }


def resumed() -> dict[str, Any]:
    """Train with dropout in one go, and from the middle of an epoch."""
    whole, parts = Chain(0.3), [Chain(0.3), Chain(0.3)]
    trainer("whole").fit(whole, data(shuffle=True))
    keeps = {"callbacks": [ModelCheckpoint(every_n_train_steps=1, save_last=True)]}
    trainer("parts", max_steps=4, **keeps).fit(parts[0], data(shuffle=True))
    trainer("parts", **keeps).fit(parts[1], data(shuffle=True), ckpt_path="last")
    return {"whole": state_of(whole), "resumed": state_of(parts[1])}


class Operations(trainkit.Callback):
    """Keeps the operations of a sample that a monitor counts."""

    def __init__(self) -> None:
        self.counted: list[float] = []

    def on_metrics(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        """Divide its rates."""
        if "throughput/tflops" in metrics:
            flops = metrics["throughput/tflops"] * 1e12
            self.counted.append(flops / metrics["throughput/samples_per_s"])


def measured() -> dict[str, Any]:
    """Return the operations of a sample."""
    noted = Operations()
    run = trainer(
        "measured", max_epochs=1, log_every_n_steps=1, callbacks=[ThroughputMonitor(), noted]
    )
    run.fit(Chain(), data())
    return {"operations": noted.counted}


def masked() -> dict[str, Any]:
    """Train BERT."""
    task, run = Padded(), trainer("masked")
    texts = DataLoader(Texts(), 2)
    run.fit(task, texts, texts)
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"state": state_of(task), "values": values}


def normed() -> dict[str, Any]:
    """Train with an average of weights and statistics, and resume."""
    even = DataLoader(Subset(Rows(), range(2 * STEP)), 2)  # a norm wants two samples
    for epochs in (1, 2):
        task = Normed()
        run = trainer("normed", max_epochs=epochs, callbacks=[EMA(0.8), ModelCheckpoint()])
        run.fit(task, even, data(), ckpt_path=None if epochs == 1 else "last")
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"state": state_of(task), "values": values}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "counted": counted,
    "resumed": resumed,
    "masked": masked,
    "normed": normed,
    "measured": measured,
}

if __name__ == "__main__":
    if len(sys.argv) > 4:  # a job of its own: its ranks end at different places
        wrong = {kind.__name__: kind for kind in (Skips, Beside, Early, Chain)}[sys.argv[4]]
        trainer("wrong", max_steps=1).fit(wrong(), data())
    results: dict[str, Any] = {}
    with make_engine(NAME, **OPTIONS) as engine:  # type: ignore[arg-type]
        for scenario, run in SCENARIOS.items():
            results[scenario] = engine.comm.all_gather_object(run())
        if OPTIONS.get("pipeline") == 2:
            OUT = OUT.parent / INTERLEAVED / OUT.name
            OPTIONS["pipeline_schedule"] = INTERLEAVED
            results[INTERLEAVED] = {
                scenario: engine.comm.all_gather_object(run())
                for scenario, run in SCENARIOS.items()
            }
        if engine.ranks.is_main:
            torch.save(results, Path(sys.argv[1]))
        engine.comm.barrier()
