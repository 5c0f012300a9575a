"""What ranks of tensor groups read, count, draw and report, beside one process.

    torchrun --nproc-per-node 4 tensor.py OUT fsdp '{"tensor":2}'
    python tensor.py OUT single '{}'

Rank 0 saves {scenario: [rank 0's result, ...]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainkit
from recipes.bert import BERT
from recipes.gpt import GPT
from recipes.gpt2 import GPT2
from recipes.language_model import LanguageModel, MaskedLanguageModel
from trainkit.callbacks import DivergenceGuard, GradientMonitor, ModelSummary, ThroughputMonitor
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError

OUT, NAME, OPTIONS = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
WIDTH, SAMPLES = 12, 21  # 2 data ranks, 4 samples a step on each: 8, 8, and a last step of 5


class Rows(Dataset[Any]):
    """Numbered samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().tanh(), index


class Stream(IterableDataset[Any]):
    """The same samples, without a length."""

    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[i] for i in range(SAMPLES))


class Wide(trainkit.Task):
    """A pair of wide layers, and dropout beside it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        self.seen: list[list[int]] = []
        self.kept: list[list[bool]] = []

    def parallelize(self, mesh: Any) -> Any:
        """Name the pair."""
        return {"up": "colwise", "down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        """Return a number a sample."""
        x = self.dropout(self.first(x))
        if self.training:
            self.kept.append((x != 0).flatten().tolist())
        return self.down(self.up(x).tanh()).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Weigh each sample by its number, and log."""
        x, y, number = batch
        self.seen.append(number.tolist())
        weight = number + 1.0
        self.log("train/samples", float(len(x)), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("train/number", number.double().mean(), on_epoch=True, on_step=False)
        return {
            "loss": ((self(x) - y).square() * weight).sum() / weight.sum(),
            "num_samples": weight.sum(),
        }

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log sums and means."""
        x, y, number = batch
        self.log("val/loss", (self(x) - y).square().mean())
        self.log("val/samples", float(len(x)), reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        """Log a sum over ranks."""
        self.log("ranks", 1.0, reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the samples' numbers."""
        self(batch[0])
        return batch[2]

    def configure_optimizers(self) -> Any:
        """Return plain SGD, which shows a wrong scale."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(Wide):
    """Applies torch's plan itself; the last layer gathers its outputs."""

    def parallelize(self, mesh: Any) -> None:
        """Call parallelize_module."""
        plan = {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "first": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, plan)


class NoPlan(Wide):
    """Has no plan."""

    def parallelize(self, mesh: Any) -> None:
        """Name no layer."""


class Misnamed(Wide):
    """Names a layer that it does not have."""

    def parallelize(self, mesh: Any) -> Any:
        """Name one."""
        return {"upper": "colwise"}


class Odd(Wide):
    """Splits a layer of one output."""

    def parallelize(self, mesh: Any) -> Any:
        """Name it."""
        return {"down": "colwise"}


class Tied(Wide):
    """Splits a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, WIDTH, bias=False)
        self.again.weight = self.up.weight


class NotALayer(Wide):
    """Splits what is no layer with weights."""

    def parallelize(self, mesh: Any) -> Any:
        """Name it."""
        return {"dropout": "rowwise"}


def fit(
    task: trainkit.Task,
    folder: str,
    data: Any = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Fit and return the Trainer."""
    settings = {
        "max_epochs": 2,
        "precision": "64-true",
        "global_batch_size": 8,
        "lr_scaling": "none",
    } | settings
    trainer = trainkit.Trainer(
        engine=make_engine(NAME, **(OPTIONS if options is None else options)),  # type: ignore[arg-type]
        run_dir=str(OUT.parent / folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        seed=4,
        **settings,
    )
    loader = DataLoader(Rows(), 4, shuffle=True) if data is None else data
    trainer.fit(task, loader, DataLoader(Rows(), 2))
    return trainer


def whole(task: trainkit.Task) -> dict[str, Tensor]:
    """Return all weights, whole."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in task.named_parameters()
    }


def counted() -> dict[str, Any]:
    """Train on map-style data, and predict."""
    task = Wide()
    guard = [DivergenceGuard(every_n_steps=1)] if ENGINE.ranks.world_size > 1 else []
    trainer = fit(task, "counted", callbacks=guard)
    results = {"weights": whole(task), "seen": task.seen, "values": dict(trainer.callback_metrics)}
    folder = OUT.parent / "predictions"
    predicted = trainer.predict(task, DataLoader(Rows(), 2), write_to=folder)
    written = torch.cat(list(trainkit.read_predictions(folder))).tolist()
    return results | {"predicted": torch.cat(predicted).tolist(), "written": written}


def by_hand() -> dict[str, Any]:
    """Train with a plan that the Task applies."""
    task = ByHand()
    fit(task, "by_hand")
    split = {
        name
        for name, p in task.named_parameters()
        if isinstance(p, DTensor) and "tensor" in p.device_mesh.mesh_dim_names
    }
    return {"weights": whole(task), "split": split}


def scaled() -> dict[str, Any]:
    """Return the contract of batch and rate, and the operations of a sample."""
    task, noted = Wide(), Noted("throughput")
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[2]))
    trainer = fit(
        task,
        "scaled",
        global_batch_size=None,
        lr_scaling="linear",
        callbacks=[monitor, noted],
        max_epochs=1,
        log_every_n_steps=1,
    )
    rates = [values for values in noted.values if values]
    return {
        "operations": [
            values["throughput/tflops"] * 1e12 / values["throughput/samples_per_s"]
            for values in rates
        ],
        "contract": trainer.run.batch_plan.to_dict(),
        "lr": trainer.run.rates.current(),
        "steps": trainer.global_step,
    }


def dropped() -> dict[str, Any]:
    """Return which activations dropout kept."""
    task = Wide(dropout=0.5)
    fit(task, "dropped", max_epochs=1)
    return {"kept": task.kept, "seen": task.seen}


def streamed() -> dict[str, Any]:
    """Train on a stream."""
    task = Wide()
    fit(task, "streamed", DataLoader(Stream(), 2))
    return {"weights": whole(task), "seen": task.seen}


class Noted(trainkit.Callback):
    """Keeps what rank 0 logs.

    Args:
        names: begins of names.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.values: list[dict[str, float]] = []

    def on_metrics(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        """Keep those."""
        own = {name: value for name, value in metrics.items() if name.startswith(self.names)}
        self.values.append(own)


def watched() -> dict[str, Any]:
    """Return the norms of gradients and updates, which a summary of layers precedes."""
    task, noted = Wide(), Noted("grad_norm", "update_ratio")
    monitor = GradientMonitor(every_n_steps=1, group_depth=1, update_ratio=True)
    fit(task, "watched", callbacks=[ModelSummary(max_depth=2), monitor, noted], max_epochs=1)
    return {"norms": [values for values in noted.values if values]}


def recipes() -> dict[str, Any]:
    """Train the language models under SGD."""
    weights: dict[str, Tensor] = {}
    tokens = torch.randint(0, 32, (16, 9), generator=torch.Generator().manual_seed(2))
    labels = tokens.where(torch.rand(16, 9, generator=torch.Generator().manual_seed(3)) < 0.4, -100)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    masked = torch.utils.data.TensorDataset(tokens, labels)
    for kind, task, data in (
        (GPT, LanguageModel, tokens),
        (GPT2, LanguageModel, tokens),
        (BERT, MaskedLanguageModel, masked),
    ):
        torch.manual_seed(6)
        trained = task(kind(vocab_size=32, context=9, width=16, depth=2, heads=4, dropout=0.0), sgd)
        fit(trained, kind.__name__, DataLoader(data, 4), limit_val_batches=0)
        weights |= {f"{kind.__name__} {name}": value for name, value in whole(trained).items()}
    return {"weights": weights}


class Overflowing(Wide):
    """At step 1 one rank's part of one weight has an infinite gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a small loss, which fp16's first scale does not overflow."""
        return super().training_step(batch, batch_idx)["loss"] * 1e-3

    def on_after_backward(self) -> None:
        """Write it, on the second rank of the last tensor group."""
        last = self.trainer.world_size - 1
        if self.trainer.global_step == 1 and self.trainer.global_rank == last:
            grad = self.up.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = torch.inf


def overflowed() -> dict[str, Any]:
    """Return the updates that fp16 has held back on each rank."""
    task = Overflowing()
    trainer = fit(task, "overflowed", precision="16-mixed", max_epochs=1)
    return {
        "skipped": trainer.run.state.skipped_steps,
        "finite": all(bool(w.isfinite().all()) for w in whole(task).values()),
    }


def refused() -> dict[str, Any]:
    """Return the message of each fit that cannot be."""
    cases: dict[str, Any] = {
        "no plan": lambda: fit(NoPlan(), "x"),
        "unknown name": lambda: fit(Misnamed(), "x"),
        "width": lambda: fit(Odd(), "x"),
        "tied": lambda: fit(Tied(), "x"),
        "no layer": lambda: fit(NotALayer(), "x"),
        "heads": lambda: fit(
            LanguageModel(GPT(8, 9, 1, 3), torch.optim.SGD),
            "x",
            [torch.zeros(2, 9, dtype=torch.long)],
        ),
        "sharded": lambda: fit(Wide(), "x", trainkit.sharded(DataLoader(Stream(), 2))),
        "plan by config": lambda: fit(
            Wide(), "x", None, OPTIONS | {"tensor_plan": {"upper.*": "colwise"}}
        ),
        "ranks": lambda: fit(Wide(), "x", None, {"tensor": 3}),
        "groups": lambda: fit(Wide(), "x", None, {"tensor": 2, "replicas": 4}),
        "plan alone": lambda: fit(Wide(), "x", None, {"tensor_plan": {"up": "colwise"}}),
    }
    results = {}
    for name, case in cases.items():
        try:
            case()
        except TrainkitError as error:
            results[name] = str(error)
    return results


SCENARIOS = {
    f.__name__: f
    for f in (counted, by_hand, scaled, dropped, streamed, overflowed, watched, recipes)
}

if __name__ == "__main__":
    results = {}
    ENGINE = make_engine(NAME, **OPTIONS)  # type: ignore[arg-type]
    with ENGINE:
        chosen = SCENARIOS | ({"refused": refused} if NAME == "fsdp" else {})
        for scenario, run in chosen.items():
            results[scenario] = ENGINE.comm.all_gather_object(run())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
