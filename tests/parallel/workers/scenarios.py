"""Runs every scenario in one start of a launcher and saves the result of each.

    python scenarios.py OUT WIDTH          one process, WIDTH microbatches accumulated
    horovodrun -np WIDTH python scenarios.py OUT WIDTH
    torchrun --nproc-per-node WIDTH scenarios.py OUT WIDTH [fsdp]

So a step has the same WIDTH x 4 samples everywhere. Each scenario returns tensors and plain values;
those of all ranks are gathered and rank 0 saves {scenario: [rank 0's, rank 1's, ...]}.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainkit
from recipes.augment import Augment, Mix
from recipes.image_classifier import ImageClassifier
from tests.parallel.workers.experts import Mixed
from trainkit.data.streams import sharded
from trainkit.engine.base import Engine
from trainkit.engine.select import make_engine

BATCH = 4
OUT, WIDTH = sys.argv[1], int(sys.argv[2])
NAME: Any = (sys.argv[3:] or ["auto"])[0]
ENGINE = make_engine(NAME)
with ENGINE:
    RANKS = ENGINE.ranks.world_size


def data(samples: int) -> TensorDataset:
    """A small regression problem in float64."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1, keepdim=True) * 0.5).tanh())


class Regression(trainkit.Task):
    """Two layers; the optimizer is the scenario's."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.make = optimizer
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0][:, 0].tolist()
        return (self(batch[0]) - batch[1]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self(batch[0]) - batch[1]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return self.make(self)


def trainer(**settings: Any) -> trainkit.Trainer:
    """A quiet trainer of this launcher's engine; one process accumulates the ranks' batches."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    accumulate = {"accumulate_grad_batches": WIDTH} if RANKS == 1 else {}
    defaults = {
        "engine": NAME,
        "max_epochs": 2,
        "precision": "64-true",
        "lr_scaling": "none",
        "run_dir": FOLDER,
    }
    return trainkit.Trainer(**quiet | accumulate | defaults | settings)


def weights(task: nn.Module) -> Tensor:
    """All weights in one vector."""
    return torch.cat([whole(p).double().reshape(-1) for p in task.parameters()])


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may hold a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def sgd(task: Any) -> Any:
    """Plain SGD: it shows a wrong scale of the gradient, which Adam would hide."""
    return torch.optim.SGD(task.parameters(), lr=0.3)


def everything(task: Any) -> Any:
    """Momentum, weight decay and a schedule that steps each step."""
    optimizer = torch.optim.SGD(
        task.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, task.trainer.estimated_stepping_batches
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(task: Any, samples: int, **settings: Any) -> Any:
    """Train and return the task."""
    trainer(**settings).fit(task, DataLoader(data(samples), BATCH, shuffle=True))
    return task


def plain() -> dict[str, Any]:
    """Plain SGD on a data set with a short last step;
    ranks begin with rank 0's weights, whatever their own were.
    """
    task = Regression(sgd)
    if not ENGINE.ranks.is_main:
        for parameter in task.parameters():
            parameter.data.add_(1)
    fit(task, WIDTH * BATCH * 3 + 5)
    return {"weights": weights(task), "seen": task.seen}


def nearly_empty() -> dict[str, Any]:
    """The last step has a single sample: all ranks but one have none."""
    task = fit(Regression(sgd), WIDTH * BATCH * 2 + 1)
    return {"weights": weights(task), "seen": task.seen}


def full() -> dict[str, Any]:
    """Momentum, weight decay, clipping, linear scaling, warm-up, cosine decay,
    a short last step.
    """
    settings = {
        "lr_scaling": "linear",
        "lr_reference_batch_size": 2,
        "lr_warmup_steps": 5,
        "gradient_clip_val": 0.02,
    }
    return {"weights": weights(fit(Regression(everything), WIDTH * BATCH * 3 + 5, **settings))}


def adamw() -> dict[str, Any]:
    """AdamW, as most users have it."""
    make = lambda task: torch.optim.AdamW(task.parameters(), lr=0.01)  # noqa: E731
    return {"weights": weights(fit(Regression(make), WIDTH * BATCH * 3 + 5))}


class Tokens(Regression):
    """Weighs each batch by a number of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = 1 + (batch[0][:, :1].abs() * 3).floor()
        loss = ((self(batch[0]) - batch[1]).pow(2) * tokens).sum() / tokens.sum()
        return {"loss": loss, "num_samples": tokens.sum()}


def tokens() -> dict[str, Any]:
    """The step's gradient is that of the mean over tokens, not over batches."""
    return {"weights": weights(fit(Tokens(sgd), WIDTH * BATCH * 2 + 1))}


class Parts(Regression):
    """One layer is never used, and one is frozen until the second epoch."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__(optimizer)
        self.idle = nn.Linear(2, 2)
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def parts() -> dict[str, Any]:
    """Unused layers do not change under weight decay;
    an unfrozen layer is trained alike on all ranks.
    """
    make = lambda task: torch.optim.SGD(task.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)  # noqa: E731
    task = Parts(make)
    before = weights(task.idle), weights(task.net[0])
    fit(task, WIDTH * BATCH * 2)
    moved = not torch.equal(before[1], weights(task.net[0]))
    return {
        "weights": weights(task),
        "idle_kept": torch.equal(before[0], weights(task.idle)),
        "thawed_moved": moved,
    }


class Branches(Regression):
    """Which of two layers is used depends on the sample, so on the rank."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__(optimizer)
        self.other = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([(self.other if x[0] > 1.2 else self.net)(x).unsqueeze(0) for x in inputs])


def branches() -> dict[str, Any]:
    """A layer that only some ranks used in a step is summed all the same."""
    return {"weights": weights(fit(Branches(everything), WIDTH * BATCH * 3))}


def experts() -> dict[str, Any]:
    """Experts that some ranks have no token for in a microbatch, and biases that count all;
    three microbatches of a rank in a step, and one sample in the last one.
    """
    task = Mixed(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    settings = {"accumulate_grad_batches": 3 * WIDTH // RANKS, "max_epochs": 2}
    fit(task, WIDTH * BATCH * 3 * 2 + 1, **settings)
    biases = torch.cat(task.routers.biases())
    return {"weights": torch.cat([weights(task), biases]), "counts": task.counts}


class Keeps(Regression):
    """Keeps each step's gradients, as they are, or a view of them."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        last = self.net[2].weight.grad
        self.kept = [
            *getattr(self, "kept", []),
            last if self.trainer.global_step % 2 else last.view(-1)[2:5],
        ]


def kept() -> dict[str, Any]:
    """Gradients that the user holds do not change."""
    task = fit(Keeps(sgd), WIDTH * BATCH * 5)
    return {"weights": torch.cat([grad.reshape(-1) for grad in task.kept])}


def scaled_half() -> dict[str, Any]:
    """fp16 with loss scaling: an overflow on one rank holds the update back on all."""

    class Overflow(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            bad = self.trainer.global_step == 2 and self.trainer.global_rank == RANKS - 1
            return loss * float("inf") if bad else loss

    task = Overflow(sgd)
    run = trainer(precision="16-mixed")
    held = data(WIDTH * BATCH * 3)
    run.fit(
        task, DataLoader(TensorDataset(*(t.float() for t in held.tensors)), BATCH, shuffle=True)
    )
    return {"weights": weights(task), "skipped": run.state.skipped_steps, "steps": run.global_step}


def brain_float() -> dict[str, Any]:
    """Weights in bfloat16, which Horovod itself cannot send."""
    return {"weights": weights(fit(Regression(sgd), WIDTH * BATCH * 3, precision="bf16-true"))}


class Convolution(trainkit.Task):
    """A convolution and a norm, for channels_last and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def images(engine: Engine) -> Any:
    """Train the convolution in float32, accumulating twice, in channels_last."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(40, 3, 8, 8, generator=generator)
    held = TensorDataset(pictures, torch.arange(40) % 4)
    settings = {
        "engine": engine,
        "precision": "32-true",
        "channels_last": True,
        "accumulate_grad_batches": 2,
    }
    task = Convolution()
    run = trainer(**settings, max_epochs=3, gradient_clip_val=0.5)
    run.fit(task, DataLoader(held, BATCH, shuffle=True))
    return task


def channels_last() -> dict[str, Any]:
    """Our sums, in channels_last."""
    return {"weights": weights(images(make_engine(NAME)))}


def stock_wrapper() -> dict[str, Any]:
    """The sums of hvd.DistributedOptimizer, under Horovod."""
    if ENGINE.name != "horovod":
        return {}
    from tests.helpers.stock_reducer import StockEngine

    return {"weights": weights(images(StockEngine() if RANKS > 1 else make_engine(NAME)))}


class Whole(Regression):
    """Two layers of whole weights, for whole inputs:
    each sum is exact, in whatever order and batch it is taken.
    """

    def __init__(self) -> None:
        super().__init__(sgd)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_((parameter * 10).round())


def evaluation() -> dict[str, Any]:
    """Validation counts each sample once; predictions come in the data's order."""
    inputs, targets = (column.mul(10).round() for column in data(23).tensors)
    task, held = Whole(), DataLoader(TensorDataset(inputs, targets), BATCH)
    values = trainer().validate(task, held)
    predictions = trainer().predict(task, held)
    with torch.no_grad():
        outputs = task.double()(inputs)
    expected = (outputs - targets).pow(2).mean().item()
    return {
        "value": values["val/loss"],
        "expected": expected,
        "same": torch.equal(torch.cat(predictions), outputs),
    }


class Stream(IterableDataset):
    """Samples of unknown number; rank r has a share of its own length."""

    def __iter__(self) -> Any:
        held = data(WIDTH * BATCH * 2 + 3)
        yield from (held[i] for i in range(ENGINE.ranks.rank, len(held), RANKS))


def streams() -> dict[str, Any]:
    """Ranks with unequal streams end together, and no sample is lost."""
    task = Regression(sgd)
    run = trainer(max_steps=20, max_epochs=2)
    run.fit(task, sharded(DataLoader(Stream(), BATCH)))
    return {"weights": weights(task), "seen": task.seen, "samples": run.state.samples_seen}


def mixed() -> dict[str, Any]:
    """The image recipe with MixUp, CutMix and repeats; each copy of a sample has noise of its own.
    Every batch is even.
    """
    generator = torch.Generator().manual_seed(8)
    images = torch.randn(WIDTH * BATCH * 4, 3, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (len(images),), generator=generator)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    make = functools.partial(torch.optim.SGD, lr=0.1)
    task = ImageClassifier(
        model, make, mix=Mix(mixup_alpha=0.5, cutmix_alpha=1.0), loss="bce", label_smoothing=0.1
    )
    augment = Augment(random_erasing=0.5, repeats=2, repeat_within=WIDTH * BATCH)
    trainer().fit(
        task, augment.loader(Erased(TensorDataset(images, labels), augment.erasing[0]), BATCH)
    )
    return {"weights": weights(task)}


class Erased(TensorDataset):
    """Samples with a random transform."""

    def __init__(self, samples: TensorDataset, transform: Any) -> None:
        super().__init__(*samples.tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.transform(image), label


SCENARIOS = [
    plain,
    nearly_empty,
    full,
    adamw,
    tokens,
    parts,
    branches,
    experts,
    kept,
    scaled_half,
    brain_float,
]
SCENARIOS += [channels_last, stock_wrapper, evaluation, streams, mixed]

if __name__ == "__main__":
    results = {}
    with ENGINE, tempfile.TemporaryDirectory() as FOLDER:
        for scenario in SCENARIOS:
            results[scenario.__name__] = ENGINE.comm.all_gather_object(scenario())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
