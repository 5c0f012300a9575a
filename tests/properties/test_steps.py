"""Properties of every step, at 1 to 5 ranks: each sample used once, the gradient of the whole
batch, exact means.

The ranks are threads (tests/helpers/threads.py), so that Trainer, loop and feeds are the real ones
on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, quiet, rows, weights
from trainkit.data.streams import sharded

EPOCHS = 2
Batches = list[list[int]]  # the indices of the samples of each batch
few = settings(deadline=None, max_examples=150)


@dataclass(frozen=True)
class Case:
    """A run: its ranks, and the split and weights of its samples.

    Attributes:
        samples: in the data set.
        ranks: threads.
        batch_size: the microbatch of one rank.
        accumulate: as the Trainer takes it.
        shuffle: of the loader.
        drop_last: of the loader.
        limit: as limit_train_batches and limit_val_batches.
        weighs: whether training_step returns a num_samples of its own.
        shards: for each rank the batches that it iterates as a stream; None for a data set that is
            split.
    """

    samples: int
    ranks: int
    batch_size: int
    accumulate: int | dict[int, int]
    shuffle: bool = False
    drop_last: bool = False
    limit: int | float | None = None
    weighs: bool = False
    shards: tuple[Batches, ...] | None = None

    def global_batch_size(self, epoch: int) -> int:
        """Return the samples of a full step."""
        accumulate = self.accumulate
        if isinstance(accumulate, dict):
            accumulate = accumulate.get(epoch, accumulate[0])
        return self.batch_size * self.ranks * accumulate

    def indices(self, epoch: int) -> list[int]:
        """Return the samples of an epoch, ascending; with `shuffle` only their number counts."""
        if self.shards is not None:
            assert not isinstance(self.limit, float)
            return sorted(i for own in self.shards for batch in own[: self.limit] for i in batch)
        left, size = self.samples, self.global_batch_size(epoch)
        if isinstance(self.limit, float):
            left = int(left * self.limit)
        elif self.limit is not None and self.limit * self.batch_size * self.ranks < left:
            # full microbatches: drop_last drops none of them
            return list(range(self.limit * self.batch_size * self.ranks))
        return list(range(left // size * size if self.drop_last else left))

    def on_one_rank(self) -> Case:
        """Return the run of one rank that takes the batches of these ranks in turn."""
        own, limit = self.accumulate, self.limit
        changed = (
            {e: n * self.ranks for e, n in own.items()}
            if isinstance(own, dict)
            else own * self.ranks
        )
        limit = limit * self.ranks if isinstance(limit, int) else limit
        return replace(self, ranks=1, accumulate=changed, limit=limit)


accumulations = st.integers(1, 4) | st.fixed_dictionaries(
    {0: st.integers(1, 4), 1: st.integers(1, 4)}
)
counts = st.none() | st.integers(1, 6)


@st.composite
def shared(draw: st.DrawFn) -> Case:
    """Runs over a data set, which trainkit shards over ranks."""
    ranks = draw(st.integers(1, 5))
    case = Case(
        samples=draw(st.integers(ranks, 60)),
        ranks=ranks,
        batch_size=draw(st.integers(1, 5)),
        accumulate=draw(accumulations),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        limit=draw(counts | st.floats(0.1, 1.0)),
        weighs=draw(st.booleans()),
    )
    # a share of no sample is refused
    assume(not isinstance(case.limit, float) or case.samples * case.limit >= 1)
    assume(all(case.indices(epoch) for epoch in range(EPOCHS)))
    return case


@st.composite
def streamed(draw: st.DrawFn) -> Case:
    """Runs over streams: each rank brings batches of its own,
    of any sizes and any number, none included.
    """
    sizes = draw(st.lists(st.lists(st.integers(1, 5), max_size=5), min_size=1, max_size=5))
    assume(any(sizes))
    numbers: Iterator[int] = iter(range(125))
    shards = tuple([[next(numbers) for _ in range(size)] for size in own] for own in sizes)
    return Case(
        samples=sum(sum(own) for own in sizes),
        ranks=len(sizes),
        batch_size=1,
        accumulate=draw(accumulations),
        limit=draw(counts),
        weighs=draw(st.booleans()),
        shards=shards,
    )


@dataclass
class Seen:
    """The samples of one rank, by (epoch, step)."""

    samples: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    before: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    evaluated: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    end: Tensor | None = None


class Probe(Line):
    """Fits a line under a non-linear loss, and records its batches."""

    def __init__(self, weighs: bool) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.weighs, self.seen = weighs, Seen()

    def losses(self, batch: Any) -> Tensor:
        """Return the loss of each sample."""
        x, y = batch[0], batch[1]
        return (self(x) - y).square().sum(1) + (self(x) * y).tanh().sum(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Weigh each sample by the batch's weights, or equally."""
        place = self.trainer.current_epoch, self.trainer.global_step
        self.seen.samples.setdefault(place, []).extend(batch[2].tolist())
        losses, own = self.losses(batch), batch[3]
        self.log("train/mean", losses.mean(), on_step=False, on_epoch=True)
        if not self.weighs:
            return losses.mean()
        return {"loss": (losses * own).sum() / own.sum(), "num_samples": own.sum()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the weights and the gradient that they are about to take."""
        place = self.trainer.current_epoch, self.trainer.global_step
        self.seen.before[place] = weights(self)
        self.seen.gradients[place] = torch.cat(
            [p.grad.reshape(-1) for p in self.parameters() if p.grad is not None]
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean of the batch."""
        self.seen.evaluated.extend(batch[2].tolist())
        self.log("val/mean", self.losses(batch).mean())


def data_of(case: Case) -> TensorDataset:
    """Return samples of input, target, index and weight."""
    x_NI, y_NO = rows(case.samples).tensors
    return TensorDataset(
        x_NI, y_NO, torch.arange(case.samples), 1.0 + torch.arange(case.samples) % 7
    )


def loader_of(case: Case, rank: int) -> Any:
    """Return what rank `rank` hands to the Trainer."""
    data = data_of(case)
    if case.shards is not None:
        return sharded([data[torch.tensor(batch)] for batch in case.shards[rank]])
    return DataLoader(data, case.batch_size, shuffle=case.shuffle, drop_last=case.drop_last)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all runs share; they write nothing."""
    return tmp_path_factory.mktemp("runs")


def trainer(case: Case, engine: ThreadEngine, folder: Path, **options: Any) -> Any:
    """Return a trainer in float64."""
    return quiet(
        folder,
        engine=engine,
        precision="64-true",
        lr_scaling="none",
        num_sanity_val_steps=0,
        **options,
    )


def fit_on(case: Case, folder: Path, engine: ThreadEngine) -> Seen:
    """Train on one rank and return its records."""
    task = Probe(case.weighs)
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": case.accumulate,
        "limit_train_batches": case.limit,
    }
    run = trainer(case, engine, folder, **options)
    run.fit(task, loader_of(case, engine.place))
    task.seen.metrics, task.seen.end = dict(run.callback_metrics), weights(task)
    return task.seen


def fit(case: Case, folder: Path) -> list[Seen]:
    """Train on all ranks."""
    return World(case.ranks).run(partial(fit_on, case, folder))


def steps_of(ranks: list[Seen]) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step over all ranks, sorted, by (epoch, step)."""
    places = sorted(ranks[0].gradients)
    assert all(sorted(rank.gradients) == places for rank in ranks)
    return {
        place: sorted(i for rank in ranks for i in rank.samples.get(place, [])) for place in places
    }


def epochs_of(steps: dict[tuple[int, int], list[int]]) -> list[list[list[int]]]:
    """Return the steps' samples, epoch by epoch."""
    return [
        [samples for (epoch, _), samples in steps.items() if epoch == wanted]
        for wanted in range(EPOCHS)
    ]


@few
@given(case=shared() | streamed())
def test_each_sample_is_trained_on_once_an_epoch(folder: Path, case: Case) -> None:
    """Over all ranks no sample comes twice, and only drop_last and limits leave any out."""
    for epoch, steps in enumerate(epochs_of(steps_of(fit(case, folder)))):
        trained, expected = sorted(i for samples in steps for i in samples), case.indices(epoch)
        assert len(trained) == len(set(trained)) == len(expected)
        assert case.shuffle or trained == expected
        if case.shards is None:
            assert all(len(samples) == case.global_batch_size(epoch) for samples in steps[:-1])


@few
@given(case=shared() | streamed())
def test_a_gradient_is_that_of_the_whole_batch(folder: Path, case: Case) -> None:
    """All ranks have the gradient of the mean over all samples of the step,
    with the task's weights, to 1e-10.
    """
    ranks = fit(case, folder)
    data, by_hand = data_of(case), Probe(case.weighs).double()
    last: list[Tensor] = []  # the losses of the last epoch's samples
    for (epoch, step), samples in steps_of(ranks).items():
        before = ranks[0].before[epoch, step]
        torch.nn.utils.vector_to_parameters(before, by_hand.parameters())
        batch = [t.double() for t in data[torch.tensor(samples)]]
        losses = by_hand.losses(batch)
        own = batch[3] if case.weighs else torch.ones_like(losses)
        gradients = torch.autograd.grad(
            (losses * own).sum() / own.sum(), list(by_hand.parameters())
        )
        expected = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for rank in ranks:
            torch.testing.assert_close(rank.gradients[epoch, step], expected, rtol=0, atol=1e-10)
            assert torch.equal(rank.before[epoch, step], before)
        last += [losses.detach()] if epoch == EPOCHS - 1 else []
    assert all(
        rank.metrics == {"train/mean": pytest.approx(torch.cat(last).mean().item(), rel=1e-10)}
        for rank in ranks
    )


@few
@given(case=shared())
def test_one_rank_goes_through_the_same_batches(folder: Path, case: Case) -> None:
    """Global batches are the same sets in the same order at any number of ranks,
    and end in the same weights.
    """
    many, (one,) = fit(case, folder), fit(case.on_one_rank(), folder)
    assert steps_of(many) == steps_of([one])
    assert one.end is not None
    torch.testing.assert_close(many[-1].end, one.end, rtol=0, atol=1e-10)
    assert many[0].metrics == {"train/mean": pytest.approx(one.metrics["train/mean"], rel=1e-10)}


def evaluate_on(case: Case, folder: Path, engine: ThreadEngine) -> Seen:
    """Validate on one rank and return its records."""
    task = Probe(False)
    run = trainer(case, engine, folder, limit_val_batches=case.limit)
    task.seen.metrics = run.validate(task, loader_of(case, engine.place))
    return task.seen


@few
@given(case=shared() | streamed())
def test_evaluation_is_exact(folder: Path, case: Case) -> None:
    """Each sample is evaluated once, in spite of shuffle and drop_last,
    and all ranks know the mean over all of them.
    """
    ranks = World(case.ranks).run(partial(evaluate_on, case, folder))
    expected = replace(case, drop_last=False).indices(0)
    assert sorted(i for rank in ranks for i in rank.evaluated) == expected
    losses = Probe(False).double().losses([t.double() for t in data_of(case)[expected]])
    assert [rank.metrics for rank in ranks] == [
        {"val/mean": pytest.approx(losses.mean().item(), rel=1e-12)}
    ] * case.ranks
