"""What every trainer trains: small models on data with numbered samples, and a record of the run.

A `Fit` describes a run without naming a trainer. The model records the samples of each microbatch,
an optimizer's hook the rate of each update; a fault that the Fit asks for strikes in the model's
forward, so that it comes to all trainers at the same place.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

Batch = dict[str, Tensor]
KILLED = 9  # exit code of a run that its Fit kills
FEATURES = 8
PAUSE_S = 0.5  # of each microbatch after a signal: some trainers take seconds to act on it


@dataclass(frozen=True)
class Fit:
    """A run.

    Attributes:
        rows: samples of the training data.
        batch: samples of a microbatch of one rank.
        epochs: passes over the data.
        accumulate: microbatches of a step.
        model: a perceptron, one with batch norm, or one on sequences of different lengths.
        dropout: its probability.
        optimizer: which one; its rate is `lr`.
        data: with an index, or a stream.
        workers: of the loader.
        augment: each sample gets noise that the data set draws.
        shuffle: the loader's.
        clip: the norm at which the step's gradient is clipped.
        schedule: the rate is multiplied by 0.9 after each update.
        ema: an exponential moving average (0.9) of the weights.
        precision: "16" for float16 with a loss scale.
        validation: samples of the validation data; sample i has the score i.
        scores: the validation score of each epoch, in place of that.
        patience: of early stopping on the score.
        save_every: updates between two checkpoints.
        resume: continue from the newest checkpoint of the folder.
        kill_after: updates after which the process ends without a word.
        nan_at: the update whose loss is not a number.
        inf_at: the update whose gradients are infinite.
        raise_on, hang_on, die_on, terminate_on: the rank to which that happens after `kill_after`
            updates; the last one gets SIGTERM.
        limit_of_hangs: seconds that ranks may wait for one that hangs.
        model_seed: of the weights; -1: each rank's own.
        width: of the hidden layer; large ones make large checkpoints.
        largest_file: bytes; writing beyond them fails as on a full disk, or kills if `kill_writes`.
        kill_writes: whether that kills.
        limit_after: updates after which the limit begins.
        count_reads: count values that are read off the device.
        untrusted: the checkpoint to resume from came from others.
        options: further settings of one trainer.
    """

    rows: int = 64
    batch: int = 4
    epochs: int = 2
    accumulate: int = 1
    model: Literal["perceptron", "norm", "tokens"] = "perceptron"
    dropout: float = 0.0
    optimizer: Literal["adamw", "sgd"] = "sgd"
    lr: float = 0.05
    data: Literal["map", "stream"] = "map"
    workers: int = 0
    augment: bool = False
    shuffle: bool = False
    clip: float | None = None
    schedule: bool = False
    ema: bool = False
    precision: Literal["32", "16"] = "32"
    validation: int = 0
    scores: tuple[float, ...] = ()
    patience: int | None = None
    save_every: int | None = None
    resume: bool = False
    kill_after: int | None = None
    nan_at: int | None = None
    inf_at: int | None = None
    raise_on: int | None = None
    hang_on: int | None = None
    die_on: int | None = None
    terminate_on: int | None = None
    limit_of_hangs: float | None = None
    model_seed: int = 0
    width: int = FEATURES
    largest_file: int | None = None
    kill_writes: bool = False
    limit_after: int = 0
    count_reads: bool = False
    untrusted: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(json.dumps(asdict(self), sort_keys=True))


class Record:
    """What a run leaves behind, for one rank; `save` writes it."""

    def __init__(self, fit: Fit, folder: Path, rank: int) -> None:
        self.fit, self.folder, self.rank = fit, folder, rank
        self.seen: list[list[int]] = []
        self.rates: list[float] = []
        self.values: dict[str, Any] = {}
        self.noise: list[float] = []  # of the first microbatch, by dropout
        self.weights: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.start: dict[str, Tensor] = {}
        self.times: list[float] = []  # CPU seconds of this process at each microbatch
        self.updates = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, shared by all ranks."""
        return self.folder / "run"

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Record each update of an optimizer."""

        def before(updated: torch.optim.Optimizer, *_: Any) -> None:
            self.rates.append(float(updated.param_groups[0]["lr"]))
            self.updates += 1

        optimizer.register_step_pre_hook(before)
        return optimizer

    def keep(self, model: nn.Module) -> None:
        """Record the weights at the end."""
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def save(self) -> None:
        """Write what was recorded."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        names = (
            "seen",
            "rates",
            "values",
            "noise",
            "weights",
            "average",
            "start",
            "updates",
            "times",
        )
        target = self.folder / f"record-{self.rank}.pt"
        torch.save({name: getattr(self, name) for name in names}, target.with_suffix(".part"))
        os.replace(target.with_suffix(".part"), target)


class Model(nn.Module):
    """The model of a Fit; returns its loss, as transformers' models do."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        with torch.random.fork_rng():  # the trainer's own seeding holds after it
            torch.manual_seed(record.rank + 100 if fit.model_seed < 0 else fit.model_seed)
            middle: nn.Module = nn.Dropout(fit.dropout)
            if fit.model == "norm":
                middle = nn.BatchNorm1d(fit.width)
            first, last = nn.Linear(FEATURES, fit.width), nn.Linear(fit.width, 1)
        self.net = nn.Sequential(first, middle, last)
        self._watched: tuple[Fit, Record, list[int]] = (fit, record, [0])

    def forward(
        self, i: Tensor, x: Tensor, labels: Tensor, mask: Tensor | None = None, **_: Any
    ) -> dict[str, Tensor]:
        """Return the mean squared error over samples, or over the tokens of all sequences."""
        fit, record, calls = self._watched
        if self.training and torch.is_grad_enabled():
            strike(fit, record, calls[0])
            calls[0] += 1
            record.times.append(time.process_time())
            record.seen.append(i.numpy().tolist())
            if not record.start:
                record.start = {n: v.detach().clone() for n, v in self.state_dict().items()}
        hidden = self.net[:2](x)
        if self.training and not record.noise:
            record.noise = (hidden == 0).float().flatten().tolist()
        outputs = self.net[2:](hidden)
        errors = (outputs - labels).square()
        if mask is None:
            loss = errors.mean()
        else:
            loss = (errors.squeeze(-1) * mask).sum() / mask.sum()
        at = (calls[0] - 1) // fit.accumulate + 1
        if self.training and at == fit.nan_at:
            loss = loss * float("nan")
        if self.training and at == fit.inf_at:
            loss = loss * 1e30
        return {"loss": loss, "logits": outputs}


class Pair(nn.Module):
    """A generator and a critic, each with an optimizer of its own."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        torch.manual_seed(fit.model_seed)
        self.generator = nn.Linear(4, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self._watched: tuple[Fit, Record, list[int]] = (fit, record, [0])
        torch.manual_seed(0)

    def critic_loss(self, batch: Batch) -> Tensor:
        """Return the critic's hinge loss on a batch and as many generated samples."""
        fit, record, calls = self._watched
        strike(fit, record, calls[0])
        calls[0] += 1
        record.seen.append(batch["i"].numpy().tolist())
        made = self.generator(torch.randn(len(batch["x"]), 4)).detach()
        real, fake = self.critic(batch["x"]), self.critic(made)
        return (1 - real).relu().mean() + (1 + fake).relu().mean()

    def generator_loss(self, batch: Batch) -> Tensor:
        """Return the loss of the generator."""
        return -self.critic(self.generator(torch.randn(len(batch["x"]), 4))).mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the generator's and the critic's optimizer."""
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.generator, self.critic)]


def strike(fit: Fit, record: Record, call: int) -> None:
    """Do what the Fit asks for, before microbatch `call` of this process (counted from 0)."""
    if fit.largest_file is not None and call == fit.limit_after * fit.accumulate:
        wait_for_writers(record.checkpoints)
        limit_files(fit.largest_file, fit.kill_writes)
    if fit.kill_after is None or call < fit.kill_after * fit.accumulate:
        return
    if call > fit.kill_after * fit.accumulate:
        time.sleep(PAUSE_S if fit.terminate_on is not None else 0.0)
        return
    if record.rank == fit.raise_on:
        raise RuntimeError(f"sample 13 of rank {record.rank} cannot be read")
    if record.rank == fit.hang_on:
        time.sleep(3600)
    if record.rank == fit.terminate_on:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if record.rank == fit.die_on:
        os.kill(os.getpid(), signal.SIGKILL)
    if {fit.raise_on, fit.hang_on, fit.die_on, fit.terminate_on} == {None}:
        wait_for_writers(record.checkpoints)
        record.save()
        os._exit(KILLED)


def wait_for_writers(folder: Path) -> None:
    """Wait until what writes beside training has finished: nothing below a folder changes for half
    a second, or half a minute is over.
    """
    before: list[tuple[str, int]] | None = None
    for _ in range(60):
        now = []
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):  # a draft that got its name
                    now.append((name, os.lstat(os.path.join(place, name)).st_mtime_ns))
        if sorted(now) == before:
            return
        before = sorted(now)
        time.sleep(0.5)


def limit_files(size: int, kills: bool) -> None:
    """Let each write beyond `size` bytes of a file fail, or kill this process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def sample(index: int, fit: Fit) -> Batch:
    """Return a training sample; with noise of Python's, NumPy's and torch's, if asked for."""
    draw = torch.Generator().manual_seed(1000 + index)
    if fit.model == "tokens":
        length = index % 7 + 1
        x = torch.zeros(7, FEATURES)
        x[:length] = torch.randn(length, FEATURES, generator=draw)
        labels = x.sum(1, keepdim=True) * (index % 3 + 1)
        mask = (torch.arange(7) < length).float()
        return {"i": torch.tensor(index), "x": x, "labels": labels, "mask": mask}
    x = torch.randn(FEATURES, generator=draw)
    labels = x.sum(0, keepdim=True) + index % 5
    if fit.augment:
        x = x + torch.rand(FEATURES) + random.random() + float(numpy.random.rand())
    return {"i": torch.tensor(index), "x": x, "labels": labels}


class Samples(Dataset[Batch]):
    """The training data, by index."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def __len__(self) -> int:
        return self.fit.rows

    def __getitem__(self, index: int) -> Batch:
        return sample(index, self.fit)


class Stream(IterableDataset[Batch]):
    """The training data, one after another."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.fit.rows):
            yield sample(index, self.fit)


class Scored(Dataset[Batch]):
    """The validation data: sample i has the score i."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def __len__(self) -> int:
        return self.fit.validation

    def __getitem__(self, index: int) -> Batch:
        plain = sample(index, Fit())
        return plain | {"score": torch.tensor(float(index))}


def train_data(fit: Fit) -> Any:
    """Return the data set of a Fit."""
    return Stream(fit) if fit.data == "stream" else Samples(fit)


def train_loader(fit: Fit, kind: type = DataLoader, **settings: Any) -> Any:
    """Return a loader, as for one process; `kind` is its class."""
    shuffle = {} if fit.data == "stream" else {"shuffle": fit.shuffle}
    return kind(train_data(fit), fit.batch, num_workers=fit.workers, **(shuffle | settings))


def val_loader(fit: Fit, **settings: Any) -> DataLoader[Batch]:
    """Return the loader of the validation data."""
    return DataLoader(Scored(fit), fit.batch, **settings)


def make_optimizer(fit: Fit, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a Fit."""
    kind = torch.optim.AdamW if fit.optimizer == "adamw" else torch.optim.SGD
    return kind(parameters, lr=fit.lr)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of a Fit."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _decayed)


def _decayed(updates: int) -> float:
    return 0.9**updates
