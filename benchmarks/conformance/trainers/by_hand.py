"""A plain loop with DistributedDataParallel, as PyTorch's tutorials write it.

https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html,
https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html,
https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.conformance.work import (
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

IMPORT = "pass"


def world() -> int:
    """Return the number of ranks, as torchrun says it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def loaders(fit: Fit) -> tuple[Any, Any]:
    """Return the loaders of training and validation."""
    if world() == 1:
        return train_loader(fit), DataLoader(Scored(fit), fit.batch)
    if fit.data == "stream":
        return train_loader(fit), None
    split = DistributedSampler(train_data(fit), shuffle=fit.shuffle)
    val = (
        DataLoader(Scored(fit), fit.batch, sampler=DistributedSampler(Scored(fit), shuffle=False))
        if fit.validation
        else None
    )
    return train_loader(fit, sampler=split, shuffle=None), val


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    torch.manual_seed(0)
    if world() > 1:
        limit = timedelta(seconds=fit.limit_of_hangs or 1800)
        distributed.init_process_group("gloo", timeout=limit)
    inner = Model(fit, record)
    model: nn.Module = DistributedDataParallel(inner) if world() > 1 else inner
    optimizer = record.watch(make_optimizer(fit, model.parameters()))
    schedule = make_schedule(optimizer) if fit.schedule else None
    scaler = torch.amp.GradScaler("cpu", enabled=fit.precision == "16")
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if fit.ema else None
    parts = {"model": inner, "optimizer": optimizer, "schedule": schedule, "average": average}
    parts = {name: part for name, part in parts.items() if part is not None}
    path = record.checkpoints / "checkpoint.pt"
    path.parent.mkdir(exist_ok=True)
    first = updates = 0
    if fit.resume:
        saved = torch.load(path)
        first, updates = saved["epoch"], saved["updates"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    train, val = loaders(fit)
    for epoch in range(first, fit.epochs):
        model.train()
        if world() > 1 and fit.data == "map":
            train.sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for number, batch in enumerate(train, 1):
            with torch.autocast("cpu", torch.float16, enabled=fit.precision == "16"):
                loss = model(**batch)["loss"]
            scaler.scale(loss / fit.accumulate).backward()
            total += loss.item() * len(batch["i"])
            count += len(batch["i"])
            if number % fit.accumulate and number != len(train):
                continue
            if fit.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), fit.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            updates += 1
            if schedule is not None:
                schedule.step()
            if average is not None:
                average.update_parameters(inner)
            if fit.save_every and updates % fit.save_every == 0 and record.rank == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                ended = fit.data == "map" and number == len(train)
                torch.save(states | {"epoch": epoch + ended, "updates": updates}, path)
        record.values["loss"] = total / count
        if val is not None and fit.validation:
            record.values["score"] = evaluate(model, val)
    record.keep(inner)
    if average is not None:
        record.average = {n: v.clone() for n, v in average.module.state_dict().items()}
    if world() > 1:
        distributed.destroy_process_group()


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic, with a general checkpoint as in PyTorch's tutorial."""
    torch.manual_seed(0)
    model = Pair(fit, record)
    generator, critic = model.optimizers()
    parts = {"model": model, "generator": generator, "critic": critic}
    path = record.checkpoints / "checkpoint.pt"
    path.parent.mkdir(exist_ok=True)
    first = updates = 0
    if fit.resume:
        saved = torch.load(path)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, fit.epochs):
        for batch in train_loader(fit):
            for optimizer, loss in ((critic, model.critic_loss), (generator, model.generator_loss)):
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
            updates += 1
            if fit.save_every and updates % fit.save_every == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save(states | {"epoch": epoch}, path)
    record.keep(model)


def fit_synchronised(given: Fit, record: Record) -> None:
    """Train with batch norm over all ranks, as torch.nn.SyncBatchNorm's page writes it."""
    distributed.init_process_group("gloo")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Model(given, record))
    parallel = DistributedDataParallel(model)
    optimizer = make_optimizer(given, model.parameters())
    for batch in loaders(given)[0]:
        parallel(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    record.keep(model)


def load_weights(given: Fit, record: Record) -> None:
    """Read a file of weights."""
    Model(Fit(), record).load_state_dict(torch.load(given.options["weights"]))


def evaluate(model: nn.Module, loader: Any) -> float:
    """Return the mean score, summed over ranks as torchvision's reference does."""
    model.eval()
    sums = torch.zeros(2)
    for batch in loader:
        sums += torch.tensor([batch["score"].sum(), len(batch["score"])])
    if world() > 1:
        distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def set_up() -> None:
    """Do what a process does once, before its runs."""
