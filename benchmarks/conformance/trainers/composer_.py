"""Composer's Trainer, as https://docs.mosaicml.com/projects/composer/en/latest writes it.

It wants torch 2.7.0, so it runs in an environment of its own (`make composer`). Its loader yields
the batch of an update, which `device_train_microbatch_size` divides; its sampler is
`composer.utils.dist.get_sampler` on any number of ranks; a run with checkpoints has `autoresume`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torchmetrics
from composer import Algorithm, Callback, DataSpec, State, Trainer
from composer.algorithms import EMA, GradientClipping
from composer.callbacks import EarlyStopper
from composer.models import ComposerModel
from composer.utils import dist, reproducibility
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.conformance.work import (
    Batch,
    Fit,
    Model,
    Pair,
    Record,
    Scored,
    make_optimizer,
    make_schedule,
    train_data,
    train_loader,
)

IMPORT = "from composer import Trainer"


class Trained(ComposerModel):
    """The model of a Fit, with its loss as a training metric and its score as one of validation."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.model: nn.Module = Model(fit, record)
        self.fit = fit
        self.epochs = 0  # that ended
        self.metrics: dict[bool, dict[str, torchmetrics.Metric]] = {
            True: {"loss": torchmetrics.MeanMetric()},
            False: {"score": torchmetrics.MeanMetric()},
        }

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs."""
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss."""
        loss: Tensor = outputs["loss"]
        return loss

    def eval_forward(self, batch: Batch, outputs: Any = None) -> Any:
        """Return the outputs of training, which are measured too, or the scores."""
        if outputs is not None:
            return outputs
        if self.fit.scores:
            return torch.tensor(self.fit.scores[self.epochs - 1])
        return batch["score"]

    def get_metrics(self, is_train: bool) -> dict[str, torchmetrics.Metric]:
        """Return the metric objects."""
        return self.metrics[is_train]

    def update_metric(self, batch: Batch, outputs: Any, metric: torchmetrics.Metric) -> None:
        """Add a batch to a metric."""
        if isinstance(outputs, dict):
            metric.update(outputs["loss"], len(batch["i"]))
        else:
            metric.update(outputs)


class CountsEpochs(Callback):
    """Counts for the model how many epochs ended."""

    def __init__(self, task: Trained) -> None:
        self.task = task

    def epoch_end(self, state: State, logger: Any) -> None:
        """Count one."""
        self.task.epochs = int(state.timestamp.epoch)


def tokens_of(batch: Batch) -> int:
    """Return the tokens of a batch, for `accumulate_train_batch_on_tokens`."""
    return int(batch["mask"].sum())


def train_spec(fit: Fit) -> Any:
    """Return the loader of updates' batches."""
    whole = replace(fit, batch=fit.batch * fit.accumulate)
    if fit.data == "stream":
        return train_loader(whole)
    sampler = dist.get_sampler(train_data(fit), shuffle=fit.shuffle)
    loader = train_loader(whole, sampler=sampler, shuffle=None)
    if fit.model == "tokens":
        return DataSpec(loader, get_num_tokens_in_batch=tokens_of)
    return loader


def val_spec(fit: Fit) -> Any:
    """Return the loader of the validation data; the trainer drops what its sampler pads."""
    data = Scored(fit)
    return DataLoader(data, fit.batch, sampler=dist.get_sampler(data))


def settings_of_checkpoints(fit: Fit, record: Record) -> dict[str, Any]:
    """Return what saves, and resumes."""
    if fit.save_every is None:
        return {}
    return {
        "save_folder": str(record.checkpoints),
        "save_interval": f"{fit.save_every}ba",
        "run_name": "conformance",
        "save_overwrite": True,
        "autoresume": True,
    }


def make_trainer(task: Trained, fit: Fit, record: Record, algorithms: list[Algorithm]) -> Trainer:
    """Return the Trainer of a Fit."""
    optimizer = make_optimizer(fit, task.parameters())
    callbacks: list[Callback] = [CountsEpochs(task)]
    if fit.patience is not None:  # more epochs than its patience end a run
        callbacks.append(EarlyStopper("score", "eval", comp="less", patience=fit.patience - 1))
    if fit.clip is not None:
        algorithms.append(GradientClipping("norm", fit.clip))
    updates = fit.rows // (fit.batch * fit.accumulate)
    trainer = Trainer(
        model=task,
        train_dataloader=train_spec(fit),
        train_subset_num_batches=updates if fit.data == "stream" else -1,
        eval_dataloader=val_spec(fit) if fit.validation else None,
        optimizers=optimizer,
        schedulers=make_schedule(optimizer) if fit.schedule else None,
        step_schedulers_every_batch=True if fit.schedule else None,
        algorithms=algorithms,
        callbacks=callbacks,
        max_duration=f"{fit.epochs}ep",
        device="cpu",
        precision="amp_fp16" if fit.precision == "16" else "fp32",
        device_train_microbatch_size=fit.batch,
        accumulate_train_batch_on_tokens=fit.model == "tokens",
        dist_timeout=fit.limit_of_hangs or 300.0,
        seed=0,
        progress_bar=False,
        **settings_of_checkpoints(fit, record),
    )
    record.watch(optimizer)  # later than what loads a checkpoint, which steps it with a rate of 0
    return trainer


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    reproducibility.seed_all(0)
    dist.initialize_dist("cpu", timeout=fit.limit_of_hangs or 300.0)
    task = Trained(fit, record)
    average = EMA(half_life=None, smoothing=0.9, update_interval="1ba") if fit.ema else None
    trainer = make_trainer(task, fit, record, [average] if average else [])
    trainer.fit()
    if average is not None:
        if not average.ema_weights_active:  # a checkpoint leaves the average in the model
            average.get_ema_model(task)
        record.average = {n: v.detach().clone() for n, v in task.model.state_dict().items()}
        average.get_training_model(task)
    record.keep(task.model)
    measured = trainer.state.train_metric_values | trainer.state.eval_metric_values
    record.values = {name: float(value) for name, value in measured.items()}
    trainer.close()


class Adversarial(ComposerModel):
    """Two optimizers."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.model = Pair(fit, record)

    def forward(self, batch: Batch) -> Batch:
        """Return the batch: both losses take it."""
        return batch

    def loss(self, outputs: Batch, batch: Batch) -> Tensor:
        """Return both losses."""
        return self.model.critic_loss(batch) + self.model.generator_loss(batch)


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic."""
    task = Adversarial(fit, record)
    optimizers = task.model.optimizers()
    Trainer(model=task, train_dataloader=train_spec(fit), optimizers=optimizers, device="cpu").fit()


class Rated(Trained):
    """Validates with an accuracy."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__(fit, record)
        accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.metrics[False] = {"accuracy": accuracy}

    def update_metric(self, batch: Batch, outputs: Any, metric: torchmetrics.Metric) -> None:
        """Class 0 is predicted for all; a third of the samples is of it."""
        if isinstance(outputs, dict):
            super().update_metric(batch, outputs, metric)
            return
        classes = batch["score"].long() % 3
        metric.update(torch.zeros_like(classes), classes)


def accuracy(fit: Fit, record: Record) -> None:
    """Validate with a metric object."""
    dist.initialize_dist("cpu")
    trainer = make_trainer(Rated(fit, record), fit, record, [])
    trainer.fit()
    record.values = {n: float(value) for n, value in trainer.state.eval_metric_values.items()}


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks: torch's own."""
    dist.initialize_dist("cpu")
    task = Trained(given, record)
    task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
    make_trainer(task, given, record, []).fit()
    record.keep(task.model)


def load_weights(given: Fit, record: Record) -> None:
    """Load a file of weights as `load_path` does."""
    weights = given.options["weights"]
    Trainer(model=Trained(Fit(), record), load_path=weights, load_weights_only=True, device="cpu")


def set_up() -> None:
    """Do what a process does once, before its runs."""
    warnings.simplefilter("ignore")
