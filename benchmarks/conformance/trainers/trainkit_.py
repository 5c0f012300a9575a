"""trainkit, as docs/ writes it."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchmetrics

import trainkit
from benchmarks.conformance.work import (
    Batch,
    Fit,
    Model,
    Pair,
    Record,
    make_optimizer,
    make_schedule,
    train_loader,
    val_loader,
)
from trainkit.callbacks import EMA, EarlyStopping, ModelCheckpoint, Watchdog

IMPORT = "from trainkit import Callback, DataModule, Task, Trainer"


class Trained(trainkit.Task):
    """The model of a Fit."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.model = Model(fit, record)
        self.fit, self.record = fit, record

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the loss; a mean over tokens weighs as many as there are."""
        loss = self.model(**batch)["loss"]
        self.log("loss", loss, on_epoch=True)
        if "mask" in batch:
            return {"loss": loss, "num_samples": batch["mask"].sum()}
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the score."""
        score = batch["score"].mean()
        if self.fit.scores:
            score = torch.tensor(self.fit.scores[self.trainer.current_epoch])
        self.log("score", score)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its schedule."""
        optimizer = self.record.watch(make_optimizer(self.fit, self.parameters()))
        if not self.fit.schedule:
            return optimizer
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def make_trainer(fit: Fit, record: Record, **more: Any) -> Any:
    """Return the Trainer of a Fit."""
    callbacks: list[Any] = []
    if fit.scores:  # a checkpoint after each validation
        callbacks.append(ModelCheckpoint(monitor="score", every_n_epochs=1, save_top_k=-1))
    elif fit.save_every is not None:
        callbacks.append(ModelCheckpoint(every_n_train_steps=fit.save_every, save_top_k=-1))
    if fit.ema:
        callbacks.append(EMA(decay=0.9, warmup=False))
    if fit.limit_of_hangs is not None:
        callbacks.append(Watchdog(stall_timeout_s=fit.limit_of_hangs))
    if fit.patience is not None:
        callbacks.append(EarlyStopping("score", patience=fit.patience))
    settings: dict[str, Any] = {
        "max_epochs": fit.epochs,
        "accumulate_grad_batches": fit.accumulate,
        "gradient_clip_val": fit.clip,
        "precision": "16-mixed" if fit.precision == "16" else "32-true",
        "lr_scaling": "none",
        "run_dir": str(record.checkpoints),
        "callbacks": callbacks,
        "enable_checkpointing": fit.save_every is not None or bool(fit.scores),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return trainkit.Trainer(**settings | fit.options | more)


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    trainkit.seed_everything(0)
    task = Trained(fit, record)
    trainer = make_trainer(fit, record)
    val = val_loader(fit) if fit.validation else None
    trainer.fit(task, train_loader(fit), val, ckpt_path="last" if fit.resume else None)
    record.keep(task.model)
    record.values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    record.values["epochs"] = trainer.current_epoch
    checkpoints = trainer.checkpoint_callback
    if checkpoints is not None:
        record.values["best"] = str(checkpoints.best_model_score)


class Adversarial(trainkit.Task):
    """Two optimizers by hand, as docs/optimizers.md writes it."""

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
            self.manual_backward(loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """Return both."""
        return self.model.optimizers()


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic."""
    trainkit.seed_everything(0)
    task = Adversarial(fit, record)
    # With two optimizers a step is an update of one of them, as in Lightning.
    trainer = make_trainer(replace(fit, save_every=2 * (fit.save_every or 0)), record)
    trainer.fit(task, train_loader(fit), ckpt_path="last" if fit.resume else None)
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
        self.log("accuracy", self.accuracy)


def accuracy(fit: Fit, record: Record) -> None:
    """Validate with a metric object."""
    task = Rated(fit, record)
    trainer = make_trainer(fit, record)
    trainer.fit(task, train_loader(fit), val_loader(fit))
    record.values = {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks."""
    fit(replace(given, options=given.options | {"sync_batchnorm": True}), record)


def load_weights(given: Fit, record: Record) -> None:
    """Start from a file of weights."""
    plain = Fit(epochs=1)
    trainer = make_trainer(plain, record)
    file = given.options["weights"]
    trainer.fit(Trained(plain, record), train_loader(plain), init_weights=file)


def read_config(given: Fit, record: Record) -> None:
    """Run a config file that names a function which runs commands, by the command line."""
    folder = record.folder / "conf"
    folder.mkdir()
    command = f"touch {given.options['mark']}"
    (folder / "theirs.yaml").write_text(
        "defaults: [mlp, _self_]\ncallbacks:\n  theirs:\n"
        f"    _target_: subprocess.getoutput\n    cmd: {command}\n"
    )
    os.chdir(record.folder)
    sys.argv = ["trainkit", "fit", "conf=theirs", "trainer.max_steps=1"]
    runpy.run_module("trainkit", run_name="__main__", alter_sys=True)


def sign(folder: Path) -> None:
    """Write the hashes of a checkpoint's files into its manifest again, as an attacker would."""
    for path in folder.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            data = (path.parent / name).read_bytes()
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["sha256_of_this_file"] = "0" * 64
        text = json.dumps(manifest, indent=2) + "\n"
        seal = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(text.replace("0" * 64, seal))


def set_up() -> None:
    """Do what a process does once, before its runs."""
