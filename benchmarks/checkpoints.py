"""The cost of a checkpoint of 200 MB to the running training: a model of 100 MB with its momentum,
one process, 1 thread.

    python -m benchmarks.checkpoints [--short] [--json FILE]

Contenders train the same model in turn and save weights, optimizer and step every few steps; quiet
otherwise.

    torch.save in the loop                  a plain loop
    torch's DCP async_save                  a plain loop; a stager that keeps its memory, the last save waited for
    trainkit                                ModelCheckpoint
    Lightning                               ModelCheckpoint, as it comes and with its AsyncCheckpointIO

Stall: a step that saves, less a plain step (the last third of those between two saves, when all is
written, of the same training). In all: the time of the steps from one save to the next beyond plain
steps, including the cost of the writing beside them. Medians over saves but the first, which
allocates memory. For comparison: one copy of everything into allocated memory, and trainkit's files
written in line, which hash each byte and are on disk when they are done.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from benchmarks.harness import Cell, Findings, Table, absent, main, median, take_turns
from trainkit.checkpoint.format import Snapshot, write

WIDTH, LAYERS, BATCH = 2500, 4, 64


class Clocked(nn.Module):
    """The model: four layers, 25 million parameters; records the start of each forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.begins: list[float] = []

    def forward(self, batch: Any) -> Tensor:
        """Return the loss."""
        self.begins.append(time.perf_counter())
        loss: Tensor = self.layers(batch[0]).pow(2).mean()
        return loss


class Job:
    """One training: its length, and its files.

    Attributes:
        every: steps between two saves.
        steps: of the training; the last save has steps after it too.
        folder: for its files.
        model: what is trained.
    """

    def __init__(self, folder: str, width: int, every: int, saves: int) -> None:
        self.every, self.steps, self.folder = every, every * (saves + 2) + 1, folder
        self.model, self._width = Clocked(width), width

    def optimizer(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def loader(self) -> DataLoader[Any]:
        """Return an epoch's batches: four, the same each time."""
        return DataLoader(TensorDataset(torch.randn(BATCH * 4, self._width)), BATCH)

    def batches(self) -> Iterator[Any]:
        """Return those of all steps, for a plain loop."""
        loader = self.loader()
        return islice((batch for _ in iter(int, 1) for batch in loader), self.steps)

    def costs(self) -> dict[str, list[float]]:
        """Return ms of plain steps, and for each save but the
        first its stall and its total cost.
        """
        begins = self.model.begins
        lengths = [
            1000 * (after - before) for before, after in zip(begins, begins[1:], strict=False)
        ]
        ends = range(self.every - 1, len(lengths), self.every)  # the steps that save
        step = statistics.median(
            length for end in ends for length in lengths[end - self.every // 3 : end]
        )
        seconds: dict[str, list[float]] = {"step": [step], "stall": [], "in all": []}
        for first in ends[1:-1]:
            seconds["stall"].append(lengths[first] - step)
            seconds["in all"].append(sum(lengths[first : first + self.every]) - self.every * step)
        return seconds


def plain_loop(job: Job, save: Callable[[dict[str, Any], int], None]) -> None:
    """Train by hand, and save."""
    optimizer = job.optimizer()
    for step, batch in enumerate(job.batches(), 1):
        optimizer.zero_grad()
        job.model(batch).backward()
        optimizer.step()
        if step % job.every == 0:
            save(
                {
                    "model": job.model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                },
                step,
            )


def with_torch_save(job: Job) -> None:
    """Save in the loop."""
    plain_loop(job, lambda state, step: torch.save(state, f"{job.folder}/{step}.pt"))


def with_dcp(job: Job) -> None:
    """Save beside the loop, with torch's distributed checkpoint."""
    # Without a GPU only its reuse of memory is of use; the rest of its options needs CUDA or a
    # second process.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    last: list[Any] = []

    def save(state: dict[str, Any], step: int) -> None:
        if last:
            last.pop().result()
        last.append(
            dcp.async_save(
                state, checkpoint_id=f"{job.folder}/{step}", async_stager=stager, no_dist=True
            )
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain_loop(job, save)
        last.pop().result()
    stager.close()


def with_trainkit(job: Job) -> None:
    """Save with trainkit's ModelCheckpoint."""

    class Task(trainkit.Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return job.optimizer()

    trainer = trainkit.Trainer(
        max_steps=job.steps,
        callbacks=trainkit.ModelCheckpoint(
            every_n_train_steps=job.every, every_n_epochs=None, save_top_k=-1
        ),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=job.folder,
    )
    trainer.fit(Task(), job.loader())


def with_lightning(job: Job, beside: bool) -> None:
    """Save with Lightning's ModelCheckpoint; `beside`: in a thread of its own."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return job.optimizer()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=job.steps,
            callbacks=ModelCheckpoint(job.folder, every_n_train_steps=job.every, save_top_k=-1),
            plugins=[AsyncCheckpointIO()] if beside else None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), job.loader())


CONTENDERS: dict[str, Callable[[Job], None]] = {
    "torch.save in the loop": with_torch_save,
    "torch's DCP async_save": with_dcp,
    "trainkit": with_trainkit,
    "Lightning": partial(with_lightning, beside=False),
    "Lightning, AsyncCheckpointIO": partial(with_lightning, beside=True),
}


def copy_ms(tensors: list[Tensor]) -> float:
    """Return how long one copy of all tensors takes, into memory that is there."""
    held, took = [tensor.clone() for tensor in tensors], []
    for _ in range(9):
        begin = time.perf_counter()
        for to, tensor in zip(held, tensors, strict=True):
            to.copy_(tensor)
        took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def in_line_ms(state: dict[str, Tensor], momentum: list[Tensor], times: int) -> float:
    """Return how long trainkit's writing itself takes."""
    took = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            write(Path(folder), Snapshot(state, {}, {"momentum": momentum}, {}))
            took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def measure(short: bool) -> Findings:
    """Let all take turns."""
    torch.set_num_threads(1)
    width, every, saves, rounds = (64, 4, 1, 1) if short else (WIDTH, 8, 3, 2)
    missing = absent({name: "lightning" for name in CONTENDERS if name.startswith("Lightning")})
    costs_of: dict[str, list[dict[str, list[float]]]] = {}

    def run(name: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(folder, width, every, saves)
            CONTENDERS[name](job)
            assert len(job.model.begins) == job.steps
        costs_of.setdefault(name, []).append(job.costs())
        return costs_of[name][-1]["stall"]

    present = [name for name in CONTENDERS if name not in missing]
    take_turns({name: partial(run, name) for name in present}, rounds)
    weights = {name: tensor.detach() for name, tensor in Clocked(width).state_dict().items()}
    momentum = [tensor.clone() for tensor in weights.values()]
    copy = copy_ms([*weights.values(), *momentum])
    rows: list[list[Cell]] = []
    for name in present:
        step, stall, in_all = (
            median([costs[kind] for costs in costs_of[name][1:]])
            for kind in ("step", "stall", "in all")
        )
        rows.append([name, step, stall, (stall - copy) / step, in_all])
    in_line = in_line_ms(weights, momentum, 1 if short else 5)
    rows += [
        ["one copy in memory", None, copy, None, None],
        ["trainkit's files, written in line", None, in_line, None, None],
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in [*weights.values(), *momentum])
    columns = ["", "plain step", "stall", "stall less a copy, in steps", "in all"]
    table = Table("A checkpoint, ms", columns, rows)
    settings: dict[str, Cell] = {
        "MB": size / 1e6,
        "threads": 1,
        "batch_size": BATCH,
        "steps between saves": every,
    }
    return Findings([table], [], missing, settings | {"rounds": rounds})


if __name__ == "__main__":
    main(measure)
