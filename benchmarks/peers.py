"""The same training by hand, by trainkit and by other trainers, on one process and on batches that
are in memory.

Each is written as its documentation does it. What prints or writes is switched off, but where a
name ends in ", all on". No clock runs in them: the loss notes when it is called (`Clocked`), which
costs all of them alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from benchmarks.harness import absent

Batch = tuple[Tensor, Tensor]
Model = Callable[[], nn.Module]
LogLoss = Callable[[str, Tensor], None]
MODULES = {
    "pytorch-ignite": "ignite",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
}


class Clocked:
    """A loss that records the process' CPU seconds and the wall clock's each `every` calls.

    Attributes:
        every: calls between two notes.
        cpu: notes of `time.process_time`.
        wall: notes of `time.perf_counter`.
    """

    def __init__(self, every: int = 50) -> None:
        self.every = every
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self._calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy."""
        if self._calls % self.every == 0:
            self.cpu.append(time.process_time())
            self.wall.append(time.perf_counter())
        self._calls += 1
        return nn.functional.cross_entropy(outputs, labels)


@dataclass
class Job:
    """The training of all contenders.

    Attributes:
        model: makes the model, with the same weights each time.
        optimizer: makes the optimizer of parameters.
        data: the batches of the one epoch, (inputs, labels): a list, or a DataLoader.
        loss: of (outputs, labels).
    """

    model: Model
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Any
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy


def bare(job: Job) -> None:
    """Train by hand."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for inputs, labels in job.data:
        optimizer.zero_grad()
        job.loss(model(inputs), labels).backward()
        optimizer.step()


def by_trainkit(job: Job, all_on: bool = False) -> None:
    """Train with trainkit; all on: `self.log`, CSV and TensorBoard, progress,
    checkpoints, the banner.
    """
    from trainkit import Task, Trainer

    class Trained(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = job.loss(self.model(inputs), labels)
            if all_on:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self.parameters())

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with _new_folder() as folder:
        trainer = Trainer(
            max_epochs=1, engine="single", run_dir=folder, **({} if all_on else quiet)
        )
        trainer.fit(Trained(), job.data)


class _Batches:
    """A list of batches, for Lightning, which takes a list for one of loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def by_lightning(job: Job, all_on: bool = False) -> None:
    """Train with Lightning's Trainer;
    all on: `self.log`, its CSV and TensorBoard loggers, progress bar and checkpoints.
    """
    import lightning
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = job.loss(self.model(inputs), labels)
            if all_on:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with _new_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=[CSVLogger(folder), TensorBoardLogger(folder)] if all_on else False,
            enable_checkpointing=all_on,
            enable_progress_bar=all_on,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Trained(), _Batches(job.data) if isinstance(job.data, list) else job.data)


def by_fabric(job: Job) -> None:
    """Train by hand with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = job.model()
    model, optimizer = fabric.setup(model, job.optimizer(model.parameters()))
    for inputs, labels in job.data:
        optimizer.zero_grad()
        fabric.backward(job.loss(model(inputs), labels))
        optimizer.step()


def by_accelerate(job: Job) -> None:
    """Train by hand with Accelerate, in its `accumulate` context."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    for inputs, labels in job.data:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(job.loss(model(inputs), labels))
            optimizer.step()
    accelerator.free_memory()


def by_ignite(job: Job, all_on: bool = False) -> None:
    """Train with pytorch-ignite's Engine;
    quiet, the step returns nothing, so that no `loss.item()` is in it.
    """
    from ignite.contrib.handlers import ProgressBar, TensorboardLogger
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import RunningAverage

    model = job.model()
    optimizer = job.optimizer(model.parameters())

    def step(engine: Engine, batch: Batch) -> float | None:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = job.loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item() if all_on else None

    engine = Engine(step)
    with _new_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not all_on:
            engine.run(job.data, max_epochs=1)
            return
        RunningAverage(output_transform=float).attach(engine, "loss")
        ProgressBar().attach(engine, ["loss"])
        saver = Checkpoint(
            {"model": model, "optimizer": optimizer}, DiskSaver(folder, require_empty=False)
        )
        engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
        with TensorboardLogger(log_dir=folder) as logger:
            logger.attach_output_handler(
                engine,
                Events.ITERATION_COMPLETED(every=50),
                "training",
                output_transform=lambda loss: {"loss": loss},
            )
            engine.run(job.data, max_epochs=1)


LOOPS: dict[str, Callable[[Job], None]] = {
    "bare loop": bare,
    "trainkit": by_trainkit,
    "trainkit, torch's loop": lambda job: by_trainkit(
        replace(job, optimizer=partial(job.optimizer, foreach=False))
    ),
    "pytorch-ignite": by_ignite,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
    "Lightning": by_lightning,
}
LOOPS_ALL_ON: dict[str, Callable[[Job], None]] = {
    "trainkit, all on": lambda job: by_trainkit(job, all_on=True),
    "pytorch-ignite, all on": lambda job: by_ignite(job, all_on=True),
    "Lightning, all on": lambda job: by_lightning(job, all_on=True),
}


def missing() -> dict[str, str]:
    """Return peer -> why, of those that are not installed."""
    found = absent(MODULES)
    return found | {
        f"{name}, all on": why for name, why in found.items() if f"{name}, all on" in LOOPS_ALL_ON
    }


def present(loops: dict[str, Callable[[Job], None]]) -> dict[str, Callable[[Job], None]]:
    """Return those that are installed."""
    return {name: loop for name, loop in loops.items() if name not in missing()}


@contextlib.contextmanager
def nothing_printed() -> Iterator[None]:
    """Send all output to the null device, bars and tables too."""
    with (
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        yield


@contextlib.contextmanager
def _new_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def tiny_mlp() -> nn.Module:
    """Return the MLP 16-32-4 of the step-overhead benchmarks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def tiny_batches(steps: int, size: int = 32) -> list[Batch]:
    """Return `steps` batches of 16 random numbers and one of 4 labels a sample;
    64 different ones, repeated.
    """
    draw = torch.Generator().manual_seed(0)
    some = [
        (torch.randn(size, 16, generator=draw), torch.randint(4, (size,), generator=draw))
        for _ in range(64)
    ]
    return [some[step % len(some)] for step in range(steps)]


class Rows(Dataset[Batch]):
    """Samples of a user's own class, in memory; or, without a batch size, batches."""

    def __init__(self, items: list[Batch]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        return self._items[index]


class Flow(IterableDataset[Batch]):
    """The same, as a stream."""

    def __init__(self, items: list[Batch]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._items)


def _samples(batches: list[Batch]) -> list[Batch]:
    return [sample for inputs, labels in batches for sample in zip(inputs, labels, strict=True)]


def _in_memory(batches: list[Batch]) -> TensorDataset:
    return TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))


# The same batches as data of the kinds that people have, read in the training process.
KINDS: dict[str, Callable[[list[Batch]], Any]] = {
    "a list of batches": lambda batches: batches,
    "DataLoader over a TensorDataset": lambda batches: DataLoader(
        _in_memory(batches), len(batches[0][1])
    ),
    "DataLoader over a Dataset": lambda batches: DataLoader(
        Rows(_samples(batches)), len(batches[0][1])
    ),
    "DataLoader over an IterableDataset": lambda batches: DataLoader(
        Flow(_samples(batches)), len(batches[0][1])
    ),
    "DataLoader over a Dataset of batches": lambda batches: DataLoader(
        Rows(batches), batch_size=None
    ),
    "DataLoader over a stream of batches": lambda batches: DataLoader(
        Flow(batches), batch_size=None
    ),
}


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, as torch makes it."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)
