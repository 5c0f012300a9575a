"""A plain loop with DistributedDataParallel, as PyTorch's tutorials write it.

https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html,
https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html,
https://docs.pytorch.org/docs/stable/notes/amp_examples.html,
https://docs.pytorch.org/tutorials/advanced/generic_join.html,
https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html: a run with checkpoints has
torchdata's loader, whose position is saved with them. Validation on ranks is that of
https://github.com/pytorch/examples/blob/main/imagenet/main.py.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

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


def loader_of(fit: Fit) -> Any:
    """Return the training data's loader. Ranks that would get different numbers of samples have
    uneven inputs, as in the tutorial of Join.
    """
    kind = StatefulDataLoader if fit.save_every else DataLoader
    if world() == 1 or fit.data == "stream":
        return train_loader(fit, kind)
    data = train_data(fit)
    if fit.rows % world():
        own = range(distributed.get_rank(), fit.rows, world())
        return kind(Subset(data, own), fit.batch, shuffle=fit.shuffle)
    split = DistributedSampler(data, shuffle=fit.shuffle)
    return train_loader(fit, kind, sampler=split, shuffle=None)


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
    train = loader_of(fit)
    parts = {"model": inner, "optimizer": optimizer, "schedule": schedule, "average": average}
    parts["loader"] = train if fit.save_every else None
    parts = {name: part for name, part in parts.items() if part is not None}
    path = record.checkpoints / "checkpoint.pt"
    path.parent.mkdir(exist_ok=True)
    first = updates = done = 0
    if fit.resume:
        saved = torch.load(path)
        first, updates, done = saved["epoch"], saved["updates"], saved["batches"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, fit.epochs):
        model.train()
        if isinstance(train.sampler, DistributedSampler):
            train.sampler.set_epoch(epoch)
        total, count = torch.zeros(()), 0
        for number, batch in joined(model, train, done):
            with torch.autocast("cpu", torch.float16, enabled=fit.precision == "16"):
                loss = model(**batch)["loss"]
            scaler.scale(loss / fit.accumulate).backward()
            total += loss.detach() * len(batch["i"])
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
                place = {"epoch": epoch, "updates": updates, "batches": number}
                torch.save(states | place, path)
        done = 0
        if count:
            record.values["loss"] = total.item() / count
        if fit.validation:
            record.values["score"] = evaluate(model, fit)
    record.keep(inner)
    if average is not None:
        record.average = {n: v.clone() for n, v in average.module.state_dict().items()}
    if world() > 1:
        distributed.destroy_process_group()


def joined(model: Any, loader: Any, done: int) -> Any:
    """Yield batches with their numbers; with uneven inputs, a rank whose batches end joins in the
    collectives of the others.
    """
    uneven = isinstance(loader.dataset, Subset)
    with Join([model]) if uneven else contextlib.nullcontext():
        yield from enumerate(loader, done + 1)


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic, with a general checkpoint as in PyTorch's tutorial."""
    torch.manual_seed(0)
    model = Pair(fit, record)
    generator, critic = model.optimizers()
    train = loader_of(fit)
    parts = {"model": model, "generator": generator, "critic": critic}
    parts |= {"loader": train} if fit.save_every else {}
    path = record.checkpoints / "checkpoint.pt"
    path.parent.mkdir(exist_ok=True)
    first = updates = 0
    if fit.resume:
        saved = torch.load(path)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, fit.epochs):
        for batch in train:
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
    for batch in loader_of(given):
        parallel(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    record.keep(model)


def load_weights(given: Fit, record: Record) -> None:
    """Read a file of weights."""
    Model(Fit(), record).load_state_dict(torch.load(given.options["weights"]))


def evaluate(model: nn.Module, fit: Fit) -> float:
    """Return the mean score as the ImageNet example does it: summed over ranks, and what the
    sampler drops is added on each rank.
    """
    model.eval()
    data = Scored(fit)
    if world() == 1:
        return float(sums_of(DataLoader(data, fit.batch))[0] / len(data))
    split = DistributedSampler(data, shuffle=False, drop_last=True)
    sums = sums_of(DataLoader(data, fit.batch, sampler=split))
    distributed.all_reduce(sums)
    rest = range(len(split) * world(), len(data))
    sums += sums_of(DataLoader(Subset(data, rest), fit.batch))
    return float(sums[0] / sums[1])


def sums_of(loader: Any) -> torch.Tensor:
    """Return the sum of scores, and their number."""
    sums = torch.zeros(2)
    for batch in loader:
        sums += torch.tensor([batch["score"].sum(), len(batch["score"])])
    return sums


def set_up() -> None:
    """Do what a process does once, before its runs."""
