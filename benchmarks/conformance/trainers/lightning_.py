"""Lightning's Trainer, as https://lightning.ai/docs/pytorch/2.6.6 writes it.

A run with checkpoints inside an epoch has a loader with `state_dict` and `load_state_dict`, as the
Trainer asks for when it resumes: torchdata's. It has its own sampler class, which the Trainer does
not know: on ranks, such a run brings its DistributedSampler, as `use_distributed_sampler` says.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.conformance.work import (
    Batch,
    Fit,
    Model,
    Pair,
    Record,
    make_optimizer,
    make_schedule,
    train_data,
    train_loader,
    val_loader,
)

IMPORT = "import lightning"


class Trained(lightning.LightningModule):
    """The model of a Fit."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.model = Model(fit, record)
        self.fit, self.record = fit, record

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the loss."""
        loss = self.model(**batch)["loss"]
        self.log(
            "loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["i"])
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the score."""
        score = batch["score"].mean()
        if self.fit.scores:
            score = torch.tensor(self.fit.scores[self.trainer.current_epoch])
        self.log("score", score, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its schedule."""
        optimizer = self.record.watch(make_optimizer(self.fit, self.parameters()))
        if not self.fit.schedule:
            return optimizer
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def strategy(fit: Fit) -> Any:
    """Return the strategy: DDP under a launcher, with a limit for hangs if there is one."""
    if world() == 1:
        return "auto"
    if fit.limit_of_hangs is None:
        return "ddp"
    return DDPStrategy(timeout=timedelta(seconds=fit.limit_of_hangs))


def world() -> int:
    """Return the number of ranks, as torchrun says it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def saves_inside(fit: Fit) -> bool:
    """Return whether checkpoints are due inside an epoch."""
    batches = fit.rows // fit.batch // world()
    return fit.save_every is not None and fit.save_every * fit.accumulate % batches != 0


def brings_samplers(fit: Fit) -> bool:
    """Return whether the run brings its samplers for ranks. The Trainer's own one shuffles training
    data always, and does not know torchdata's.
    """
    return world() > 1 and fit.data == "map" and (not fit.shuffle or saves_inside(fit))


def loaders(fit: Fit) -> tuple[Any, Any]:
    """Return the loaders of training and validation."""
    kind = StatefulDataLoader if saves_inside(fit) else DataLoader
    val = val_loader(fit) if fit.validation else None
    if not brings_samplers(fit):
        return train_loader(fit, kind), val
    ranks = {"num_replicas": world(), "rank": int(os.environ["RANK"]), "shuffle": False}
    split = DistributedSampler(train_data(fit), **ranks | {"shuffle": fit.shuffle})
    if val is not None:
        val = val_loader(fit, sampler=DistributedSampler(val.dataset, **ranks))
    return train_loader(fit, kind, sampler=split, shuffle=None), val


def make_trainer(fit: Fit, record: Record, **more: Any) -> Any:
    """Return the Trainer of a Fit."""
    callbacks: list[Any] = []
    every: dict[str, Any] = {"save_last": True, "save_top_k": -1}
    if fit.scores:  # a checkpoint after each validation
        callbacks.append(ModelCheckpoint(record.checkpoints, monitor="score", **every))
    elif fit.save_every is not None:
        every["save_on_exception"] = True
        if saves_inside(fit):
            every["every_n_train_steps"] = fit.save_every
        callbacks.append(ModelCheckpoint(record.checkpoints, **every))
    if fit.ema:
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if fit.patience is not None:
        callbacks.append(EarlyStopping("score", patience=fit.patience))
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world(),
        "strategy": strategy(fit),
        "max_epochs": fit.epochs,
        "accumulate_grad_batches": fit.accumulate,
        "gradient_clip_val": fit.clip,
        "precision": "16-mixed" if fit.precision == "16" else "32-true",
        "callbacks": callbacks,
        "enable_checkpointing": fit.save_every is not None or bool(fit.scores),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(record.folder),
        "use_distributed_sampler": not brings_samplers(fit),
    }
    return lightning.Trainer(**settings | fit.options | more)


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    lightning.seed_everything(0, workers=True)
    task = Trained(fit, record)
    trainer = make_trainer(fit, record)
    train, val = loaders(fit)
    trainer.fit(task, train, val, ckpt_path="last" if fit.resume else None)
    record.keep(task.model)
    record.values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    record.values["epochs"] = trainer.current_epoch
    for callback in trainer.checkpoint_callbacks:
        if callback.monitor is not None:
            record.values["best"] = str(float(callback.best_model_score))


class Adversarial(lightning.LightningModule):
    """Two optimizers by hand, as its page on manual optimization writes it."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.model = Pair(fit, record)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the critic, then the generator."""
        generator, critic = self.optimizers()
        for optimizer, loss in (
            (critic, self.model.critic_loss),
            (generator, self.model.generator_loss),
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """Return both."""
        return self.model.optimizers()


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic; each batch counts two of its steps."""
    lightning.seed_everything(0, workers=True)
    task = Adversarial(fit, record)
    trainer = make_trainer(replace(fit, save_every=2 * (fit.save_every or 0)), record)
    trainer.fit(task, loaders(fit)[0], ckpt_path="last" if fit.resume else None)
    record.keep(task.model)


class Rated(Trained):
    """Logs a metric object."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__(fit, record)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Class 0 is predicted for all; a third of the samples is of it."""
        classes = batch["score"].long() % 3
        self.accuracy(torch.zeros_like(classes), classes)
        self.log("accuracy", self.accuracy, on_epoch=True)


def accuracy(fit: Fit, record: Record) -> None:
    """Validate with a metric object."""
    task = Rated(fit, record)
    trainer = make_trainer(fit, record)
    trainer.fit(task, *loaders(fit))
    record.values = {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks."""
    fit(replace(given, options=given.options | {"sync_batchnorm": True}), record)


def load_weights(given: Fit, record: Record) -> None:
    """Load a module from a checkpoint."""
    Trained.load_from_checkpoint(given.options["weights"], fit=Fit(), record=record)


class Configured(lightning.LightningModule):
    """A module that a config file chooses the loss of."""

    def __init__(self, loss: torch.nn.Module | None = None) -> None:
        super().__init__()


def read_config(given: Fit, record: Record) -> None:
    """Run LightningCLI on a config file that names a function which runs commands, as a callback."""
    path = record.folder / "theirs.yaml"
    path.write_text(
        "trainer:\n  max_steps: 1\n  callbacks:\n"
        "    - class_path: subprocess.getoutput\n"
        f"      init_args: {{cmd: touch {given.options['mark']}}}\n"
    )
    LightningCLI(Configured, args=["fit", "--config", str(path)])


def set_up() -> None:
    """Do what a process does once, before its runs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
