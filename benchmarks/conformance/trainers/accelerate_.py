"""A loop with Accelerate, as https://huggingface.co/docs/accelerate/v1.15.0 writes it.

Its DataLoaderConfiguration has options for what claims ask: `use_seedable_sampler` for an order that
can be repeated, `split_batches` for a batch of all ranks that is the same on any number of them,
`even_batches=False` for no sample twice.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import (
    DataLoaderConfiguration,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.conformance.trainers import by_hand
from benchmarks.conformance.work import (
    Fit,
    Model,
    Pair,
    Record,
    make_optimizer,
    make_schedule,
    train_loader,
    val_loader,
)

IMPORT = "from accelerate import Accelerator"


def loading(fit: Fit) -> DataLoaderConfiguration:
    """Return how loaders are prepared; `gather_for_metrics` wants validation batches to be even."""
    return DataLoaderConfiguration(
        split_batches=True,
        even_batches=bool(fit.validation),
        use_seedable_sampler=True,
        data_seed=0,
    )


def loader_of(fit: Fit, accelerator: Accelerator) -> Any:
    """Return a loader of batches of all ranks, which `split_batches` splits. Its generator is that
    of PyTorch's notes on reproducibility: a loader without one draws from the default numbers, too.
    """
    whole = replace(fit, batch=fit.batch * accelerator.num_processes)
    return train_loader(whole, generator=torch.Generator().manual_seed(0))


def fit(fit: Fit, record: Record) -> None:
    """Train: the loop of its checkpointing guide."""
    if fit.model == "tokens":
        fit_tokens(fit, record)
        return
    project = ProjectConfiguration(str(record.checkpoints), automatic_checkpoint_naming=True)
    limit = timedelta(seconds=fit.limit_of_hangs or 1800)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=fit.accumulate,
        mixed_precision="fp16" if fit.precision == "16" else "no",
        project_config=project,
        dataloader_config=loading(fit),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)],
    )
    set_seed(0, device_specific=True)
    inner = Model(fit, record)
    optimizer = record.watch(make_optimizer(fit, inner.parameters()))
    schedule = make_schedule(optimizer) if fit.schedule else None
    loader = loader_of(fit, accelerator)
    val = validation_of(fit, accelerator) if fit.validation else None
    model, optimizer, loader, schedule, val = accelerator.prepare(
        inner, optimizer, loader, schedule, val
    )
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if fit.ema else None
    if average is not None:
        accelerator.register_for_checkpointing(average)
    first = skip = updates = 0
    if fit.resume:
        accelerator.load_state()
        updates = max(
            int(path.name.rpartition("_")[2]) + 1
            for path in (record.checkpoints / "checkpoints").iterdir()
        ) * (fit.save_every or 1)
        project.iteration = updates // (fit.save_every or 1)
        first, skip = (
            divmod(updates * fit.accumulate, len(loader))
            if fit.data == "map"
            else (0, updates * fit.accumulate)
        )
    for epoch in range(first, fit.epochs):
        model.train()
        loader.set_epoch(epoch)
        skipped = skip and epoch == first
        active = accelerator.skip_first_batches(loader, skip) if skipped else loader
        total_loss, batches = torch.zeros(()), 0
        for batch in active:
            batches += 1
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                total_loss += loss.detach()
                accelerator.backward(loss)
                if fit.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), fit.clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            updates += 1
            if average is not None:
                average.update_parameters(inner)
            if fit.save_every and updates % fit.save_every == 0:
                accelerator.save_state()
        record.values["loss"] = total_loss.item() / batches
        if val is not None:
            record.values["score"] = evaluate(accelerator, model, val)
    record.keep(accelerator.unwrap_model(model))
    if average is not None:
        record.average = {n: v.clone() for n, v in average.module.state_dict().items()}
    accelerator.end_training()


def validation_of(fit: Fit, accelerator: Accelerator) -> Any:
    """Return the loader of the validation data, in batches of all ranks."""
    return val_loader(replace(fit, batch=fit.batch * accelerator.num_processes))


def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> float:
    """Return the mean score, over what `gather_for_metrics` returns."""
    model.eval()
    scores = [accelerator.gather_for_metrics(batch["score"]) for batch in loader]
    return float(torch.cat(scores).mean())


def fit_tokens(fit: Fit, record: Record) -> None:
    """Train on sequences of different lengths, as its guide on gradient accumulation does:
    the tokens of a step are counted before its first backward.
    """
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=fit.accumulate, dataloader_config=loading(fit)
    )
    set_seed(0)
    model = Model(fit, record)
    optimizer = record.watch(make_optimizer(fit, model.parameters()))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(fit, accelerator))
    batches = iter(loader)
    while step := list(itertools.islice(batches, fit.accumulate)):
        own = torch.stack([batch["mask"].sum() for batch in step]).sum()
        count = accelerator.gather(own).sum().item()
        for number, batch in enumerate(step, 1):
            last = number == len(step)
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = model(**batch)["loss"] * batch["mask"].sum()
                loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes
                accelerator.backward(loss / count)
        optimizer.step()
        optimizer.zero_grad()
    record.keep(accelerator.unwrap_model(model))


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic."""
    project = ProjectConfiguration(str(record.checkpoints), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=loading(fit))
    set_seed(0)
    model = Pair(fit, record)
    model, generator, critic, loader = accelerator.prepare(
        model, *model.optimizers(), loader_of(fit, accelerator)
    )
    first = skip = updates = 0
    if fit.resume:
        accelerator.load_state()
        skip = updates = fit.save_every or 0
        project.iteration = 1
    for epoch in range(first, fit.epochs):
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, skip) if skip else loader:
            for optimizer, loss in ((critic, model.critic_loss), (generator, model.generator_loss)):
                optimizer.zero_grad()
                accelerator.backward(loss(batch))
                optimizer.step()
            updates += 1
            if fit.save_every and updates % fit.save_every == 0:
                accelerator.save_state()
        skip = 0
    record.keep(model)


def accuracy(fit: Fit, record: Record) -> None:
    """Validate: its guide gathers predictions and labels for a metric."""
    accelerator = Accelerator(cpu=True, dataloader_config=loading(fit))
    loader = accelerator.prepare(validation_of(fit, accelerator))
    hits = []
    for batch in loader:
        classes = accelerator.gather_for_metrics(batch["score"]).long() % 3
        hits += (classes == 0).tolist()
    record.values["accuracy"] = sum(hits) / len(hits)


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks: torch's own."""
    by_hand.fit_synchronised(given, record)


def load_weights(given: Fit, record: Record) -> None:
    """Load a file of weights into a model."""
    load_checkpoint_in_model(Model(Fit(), record), given.options["weights"])


def set_up() -> None:
    """Do what a process does once, before its runs."""
