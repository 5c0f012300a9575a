"""transformers' Trainer, as https://huggingface.co/docs/transformers/v5.23.0/trainer writes it."""

from __future__ import annotations

import shutil
from datetime import timedelta
from typing import Any

import numpy
import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import default_collate
from transformers import (
    BertConfig,
    BertModel,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from benchmarks.conformance.work import (
    Fit,
    Model,
    Record,
    Scored,
    make_optimizer,
    make_schedule,
    train_data,
)

IMPORT = "from transformers import Trainer, TrainingArguments"


class LossModel(nn.Module):
    """The model with a loss as that of its own models: the sum over labels that are not -100,
    divided by the `num_items_in_batch` of all microbatches and ranks that the Trainer gives.
    """

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, num_items_in_batch: Any = None, **batch: Any) -> Any:
        """Return the mean over all items of the step."""
        outputs = self.inner(**batch)
        if num_items_in_batch is not None:
            share = batch["labels"].ne(-100).sum() / num_items_in_batch
            return {"loss": outputs["loss"] * share, "logits": outputs["logits"]}
        return outputs


def collate(samples: list[Any]) -> Any:
    """Return a batch; labels of padding are -100."""
    batch = default_collate(samples)
    if "mask" in batch:
        batch["labels"] = batch["labels"].masked_fill(batch["mask"][..., None] == 0, -100)
    return batch


def arguments(fit: Fit, record: Record) -> TrainingArguments:
    """Return the arguments of a Fit."""
    settings: dict[str, Any] = {
        "num_train_epochs": fit.epochs,
        "per_device_train_batch_size": fit.batch,
        "per_device_eval_batch_size": fit.batch,
        "gradient_accumulation_steps": fit.accumulate,
        "max_grad_norm": 0.0 if fit.clip is None else fit.clip,
        "fp16": fit.precision == "16",
        "dataloader_num_workers": fit.workers,
        "save_strategy": "steps" if fit.save_every else "no",
        "save_steps": fit.save_every or 500,
        "eval_strategy": "epoch" if fit.validation else "no",
        "logging_strategy": "epoch",
        "logging_nan_inf_filter": False,
        "accelerator_config": {"even_batches": bool(fit.validation)},
        "seed": 0,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "label_names": ["labels"],
    }
    if fit.data == "stream":
        settings["max_steps"] = fit.epochs * fit.rows // fit.batch // fit.accumulate
    if not fit.shuffle:
        settings["train_sampling_strategy"] = "sequential"
    if fit.patience is not None:
        settings["restore_callback_states_from_checkpoint"] = True
    if fit.limit_of_hangs is not None:  # `ddp_timeout` has no effect on the CPU
        PartialState(cpu=True, timeout=timedelta(seconds=fit.limit_of_hangs))
        settings["accelerator_config"]["use_configured_state"] = True
    if fit.terminate_on is not None:
        settings["enable_jit_checkpoint"] = True
    if fit.scores:
        settings |= {
            "save_strategy": "epoch",
            "metric_for_best_model": "score",
            "greater_is_better": False,
            "load_best_model_at_end": True,
        }
    return TrainingArguments(str(record.checkpoints), **settings | fit.options)


def validation(fit: Fit) -> list[Any]:
    """Return the validation data, with scores as labels."""
    rows = map(Scored(fit).__getitem__, range(fit.validation))
    return [{"i": row["i"], "x": row["x"], "labels": row["score"][None]} for row in rows]


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    set_seed(0)
    inner = Model(fit, record)
    model = LossModel(inner)
    optimizer = record.watch(make_optimizer(fit, model.parameters()))
    schedule = (
        make_schedule(optimizer)
        if fit.schedule
        else (torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
    )
    epochs = iter(fit.scores)

    def compute_metrics(predictions: Any) -> dict[str, float]:
        if fit.scores:
            return {"score": next(epochs)}
        labels = predictions.label_ids
        return {"score": float(numpy.mean(labels))}

    callbacks = [] if fit.patience is None else [EarlyStoppingCallback(fit.patience)]
    trainer = Trainer(
        model,
        arguments(fit, record),
        data_collator=collate,
        train_dataset=train_data(fit),
        eval_dataset=validation(fit) if fit.validation else None,
        compute_metrics=compute_metrics,
        optimizers=(optimizer, schedule),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=True if fit.resume else None)
    record.keep(inner)
    history = trainer.state.log_history
    for log in history:
        record.values |= {name: log[name] for name in ("loss", "eval_score") if name in log}
    if "eval_score" in record.values:
        record.values["score"] = record.values.pop("eval_score")
    record.values["best"] = str(trainer.state.best_metric)
    record.values["epochs"] = trainer.state.epoch


def accuracy(fit: Fit, record: Record) -> None:
    """Validate: compute_metrics gets the labels of all ranks."""

    def compute_metrics(predictions: Any) -> dict[str, float]:
        return {"accuracy": float(numpy.mean(predictions.label_ids % 3 == 0))}

    trainer = Trainer(
        LossModel(Model(fit, record)),
        arguments(fit, record),
        data_collator=collate,
        eval_dataset=validation(fit),
        compute_metrics=compute_metrics,
    )
    record.values["accuracy"] = trainer.evaluate()["eval_accuracy"]


def load_weights(given: Fit, record: Record) -> None:
    """Load a pretrained model whose weights are a pickle."""
    folder = record.folder / "pretrained"
    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    config.save_pretrained(folder)
    shutil.copy(given.options["weights"], folder / "pytorch_model.bin")
    BertModel.from_pretrained(folder)


def set_up() -> None:
    """Do what a process does once, before its runs."""
