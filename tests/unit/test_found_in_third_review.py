"""Faults found in the third review, each with the claim that it broke."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, SequentialLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit import Task
from trainkit.callbacks import EMA, EarlyStopping, StochasticWeightAveraging
from trainkit.callbacks.crash_capsule.step_record import raw_random
from trainkit.checkpoint.stateful import random_state
from trainkit.cli.execute import _show_metrics
from trainkit.device.precision import Precision
from trainkit.engine.reduce.wire import make_wire
from trainkit.errors import ConfigError, TaskError
from trainkit.metrics.log import Accumulator, combine, read_all
from trainkit.optim.clipping import clip
from trainkit.run.finite import FiniteLosses

CPU = torch.device("cpu")


class Exact(Line):
    """Measures by metric objects."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(torch.ones(len(batch[0])) * (1 + batch_idx / 1000))
        self.log("mean", self.mean)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_metric_objects_count_in_what_they_count_in(tmp_path: Path, precision: str) -> None:
    """bfloat16 counts to 256 and no further: a metric object's states are not weights."""
    found = quiet(tmp_path, precision=precision).validate(Exact(), loader(4096))
    assert found["mean"] == pytest.approx(1 + sum(range(1024)) / 1024 / 1000, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_complex_weights_stay_complex(precision: Any) -> None:
    """A true precision is of real numbers."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    Precision(precision, CPU).convert(model)
    assert model.weight.is_complex()


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_complex_gradients_travel_whole(compression: str) -> None:
    """As pairs, if sums are of real numbers only; without compression in place."""
    wire = make_wire(compression, "average", 1.0, 2, frozenset({torch.float16, torch.float32}))
    grad = torch.tensor([1 + 2j, -3 - 4j], dtype=torch.complex64)
    sent = wire.pack(grad)
    assert sent.dtype is (torch.float16 if compression == "fp16" else torch.float32)
    total = wire.unpack(sent.mul_(2), torch.complex64)
    assert total.tolist() == [2 + 4j, -6 - 8j]
    assert (total.data_ptr() == grad.data_ptr()) is (compression == "none")


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_an_overflow_holds_back_all_optimizers(loss: float, limit: float | None) -> None:
    """They are one step: clipped by one norm, the finite gradients would be NaN by the others' infinity."""
    precision, models = Precision("16-mixed", CPU), [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    before = [weights(model) for model in models]
    for model, factor in zip(models, (loss, 1.0), strict=True):
        precision.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
    precision.unscale(optimizers)
    clip(optimizers, limit, "norm")
    assert not precision.step(optimizers)
    assert all(torch.equal(weights(model), was) for model, was in zip(models, before, strict=True))


class Masked(Line):
    """Weighs its batches; of one all is masked."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.full((len(batch[0]), 1), float(batch_idx != 1))
        loss = ((self(batch[0]) - batch[1]).square() * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "num_samples": mask.sum()}


def test_a_step_of_no_weight_changes_nothing(tmp_path: Path) -> None:
    """It has no gradient, as in a plain loop, and no NaN."""
    ends = []
    for steps in (1, 2):
        task = Masked()
        quiet(tmp_path / str(steps), max_steps=steps).fit(task, loader(16))
        ends.append(weights(task))
    assert torch.equal(*ends)
    assert ends[0].isfinite().all()


class Ramp:
    """A rate that holds more than plain values, which a checkpoint leaves to the task."""

    def __init__(self) -> None:
        self.steps = torch.tensor(5.0)

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / float(self.steps))


class Sequence(Line):
    """Warm-up by an object, then a cosine."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        parts = [LambdaLR(optimizer, Ramp()), CosineAnnealingLR(optimizer, 12)]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": SequentialLR(optimizer, parts, [5]), "interval": "step"},
        }


@pytest.mark.parametrize("stop", [3, 9])
def test_schedulers_within_schedulers_resume(tmp_path: Path, stop: int) -> None:
    """An unsavable part of one of them costs no other state."""
    whole, rest = Sequence(), Sequence()
    quiet(tmp_path / "whole", max_steps=17).fit(whole, loader(23))
    quiet(tmp_path / "parts", max_steps=stop, enable_checkpointing=True).fit(Sequence(), loader(23))
    quiet(tmp_path / "parts", max_steps=17, enable_checkpointing=True).fit(rest, loader(23), ckpt_path="last")
    assert torch.equal(weights(rest), weights(whole))


def test_a_samplers_own_generator_draws_again_what_it_drew(tmp_path: Path) -> None:
    """A run that resumes after its first epoch has the order of the run that never stopped; epochs differ."""

    def data() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return loader(23, sampler=WeightedRandomSampler(torch.ones(23), 23, generator=generator))

    orders: list[list[float]] = []

    class Seen(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            orders[-1].extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            orders.append([])

    whole, rest = Seen(), Seen()
    quiet(tmp_path / "whole", max_steps=12).fit(whole, data())
    assert orders[0] != orders[1]
    quiet(tmp_path / "parts", max_steps=8, enable_checkpointing=True).fit(Seen(), data())
    quiet(tmp_path / "parts", max_steps=12, enable_checkpointing=True).fit(rest, data(), ckpt_path="last")
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.parametrize("reduction", ["min", "max", "sum", "mean"])
def test_nan_does_not_vanish(reduction: Any) -> None:
    """Wherever it comes among plain numbers, tensors and ranks; infinities that cancel out are NaN too."""
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]):
        for kind in (float, torch.tensor):
            held = Accumulator(reduction)
            for value in values:
                held.add(kind(value), 1.0)
            assert math.isnan(combine([read_all({"": held})[""]]))
        assert math.isnan(combine([(reduction, value, 1.0) for value in values]))
    if reduction in ("sum", "mean"):
        assert math.isnan(combine([(reduction, value, 1.0) for value in (math.inf, -math.inf)]))


def test_a_second_fit_stops_early_by_itself(tmp_path: Path) -> None:
    """The first fit's best value does not affect the second."""
    stopping = EarlyStopping("val/loss", patience=2)
    trainer = quiet(tmp_path, max_epochs=6, callbacks=stopping)
    steps = []
    for _ in range(2):
        task = Line(lr=0.01)
        trainer.fit(task, loader(20), loader(5))
        steps.append(trainer.global_step)
    assert steps[0] == steps[1] > 10


def test_a_weight_of_two_optimizers_is_clipped_once() -> None:
    """The norm is of the gradients that there are."""
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().mul(100).backward()
    clip([SGD(model.parameters(), lr=1), SGD([model.weight], lr=1)], 1.0, "norm")
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-5)


def test_a_schedule_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would change no rate."""

    class Wrong(Line):
        def configure_optimizers(self) -> Any:
            other = SGD(self.parameters(), lr=0.1)
            return [SGD(self.parameters(), lr=0.1)], [ExponentialLR(other, 0.1)]

    with pytest.raises(TaskError, match="a ExponentialLR for an optimizer that it did not return"):
        quiet(tmp_path).fit(Wrong(), loader(8))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_sampler_of_torchs_is_what_batch_size_and_shuffle_are(tmp_path: Path, drop_last: bool) -> None:
    """Handed in or made by the DataLoader: the same run."""
    data, ends = rows(23), []
    for given in (
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last)),
        DataLoader(data, 4, shuffle=True, drop_last=drop_last),
    ):
        task = Line()
        trainer = quiet(tmp_path, max_epochs=1)
        trainer.fit(task, given)
        ends.append(weights(task))
        assert trainer.global_step == (5 if drop_last else 6)
    assert torch.equal(*ends)


def test_whole_numbers_are_not_averaged(tmp_path: Path) -> None:
    """A table of indices among the parameters stays as it is."""
    task = Line()
    task.places = nn.Parameter(torch.arange(3), requires_grad=False)
    quiet(tmp_path, max_epochs=3, callbacks=StochasticWeightAveraging(0.05, swa_epoch_start=0)).fit(task, loader(8), loader(5))
    assert task.places.tolist() == [0, 1, 2]


def test_a_loss_that_is_written_over_is_looked_at_as_it_was() -> None:
    """A CUDA graph writes each loss to the same place."""
    none: Any = None
    looked, loss = FiniteLosses(none, none, none), torch.tensor(1.0)
    looked.look(loss, none)
    loss.fill_(math.nan)
    assert float(looked._seen[0][0]) == 1.0


def test_a_rank_on_the_cpu_leaves_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a GPU that nothing has used yet for its random state would make a context there."""

    def touched(*device: Any) -> Tensor:
        raise AssertionError("the GPU was asked")

    monkeypatch.setattr(
        torch, "cuda", SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False, get_rng_state=touched)
    )
    assert random_state()["cuda"] is None
    assert raw_random()[1] is None


class Drawn(IterableDataset[Any]):
    """A stream that draws in its workers."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(20):
            yield torch.randn(3), torch.zeros(1)


def test_workers_that_a_stream_keeps_are_seeded_by_epoch_and_ended(tmp_path: Path) -> None:
    """A run that resumes after an epoch draws the numbers of the run that never stopped; no worker outlives the fit."""

    def fit(folder: str, steps: int, **options: Any) -> Tensor:
        task, data = Line(), DataLoader(Drawn(), 4, num_workers=1, persistent_workers=True)
        quiet(tmp_path / folder, max_steps=steps, enable_checkpointing=True).fit(task, data, **options)
        assert data._iterator is None
        end = time.monotonic() + 20  # of 60 s that a worker survives if only a signal ends it
        while set(multiprocessing.active_children()) - others:
            assert time.monotonic() < end, "a worker is left"
            time.sleep(0.01)
        return weights(task)

    others = set(multiprocessing.active_children())  # of tests before this one

    whole = fit("whole", 8)
    fit("parts", 6)
    assert torch.equal(fit("parts", 8, ckpt_path="last"), whole)


@pytest.mark.parametrize(
    ("option", "words"),
    [("sync_dist", "leave it out: an epoch's value is always exact"), ("on_epochs", "Did you mean 'on_epoch'?")],
)
def test_unknown_arguments_of_log_raise(tmp_path: Path, option: str, words: str) -> None:
    """For Lightning's arguments the error names a replacement, for others the known arguments."""

    class Other(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0, **{option: True})

    with pytest.raises(TaskError, match=rf"log\('loss', \.\.\.\): {option}.*") as raised:
        quiet(tmp_path).fit(Other(), loader(8))
    assert words in str(raised.value)


def test_a_monitored_step_value_has_its_own_message(tmp_path: Path) -> None:
    """It was logged, but only for steps."""
    with pytest.raises(ConfigError, match=r"'train/loss', which was not logged for an epoch; .*on_epoch=True"):
        quiet(tmp_path, callbacks=EarlyStopping("train/loss")).fit(Line(), loader(8))


def test_a_metric_of_one_process_is_what_torchmetrics_makes_of_it(tmp_path: Path) -> None:
    """A state without a reduction is stacked over ranks, and left unchanged on a single rank."""

    class Second(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("h", torch.zeros(3), dist_reduce_fx=None)

        def update(self, value: Tensor) -> None:
            self.h = self.h + value

        def compute(self) -> Tensor:
            return self.h[1]

    class Measured(Line):
        def __init__(self) -> None:
            super().__init__()
            self.second = Second()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.second.update(torch.tensor([0.0, 2.0, 0.0]))
            self.log("second", self.second)

    assert quiet(tmp_path).validate(Measured(), loader(8)) == {"second": 4.0}


@pytest.mark.parametrize(
    "data", [{"a": loader(8), "b": loader(8)}, [loader(8), loader(8)], [rows(8), rows(8)]], ids=["dict", "loaders", "data sets"]
)
def test_several_loaders_are_refused_by_name(data: Any, tmp_path: Path) -> None:
    """They are no stream of batches."""
    with pytest.raises(ConfigError, match=r"train_dataloaders is a (dict|list) of (DataLoader|TensorDataset)s"):
        quiet(tmp_path).fit(Line(), data)


def test_weights_without_a_shape_are_refused_at_several_ranks(tmp_path: Path) -> None:
    """By name, before anything is sent; one process trains them."""

    class Lazy(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    quiet(tmp_path / "one").fit(Lazy(), loader(8))

    def one(engine: ThreadEngine) -> str:
        with pytest.raises(TaskError) as raised:
            quiet(tmp_path / "two", engine=engine).fit(Lazy(), loader(8))
        return str(raised.value)

    assert "'model.0.weight' of Lazy has no shape yet" in World(2).run(one)[0]


def test_a_path_is_shown_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    """It is there to be copied."""
    path = "runs/job/checkpoints/" + 9 * "epoch=3-step=158/"
    _show_metrics({"val/acc": 0.5}, path)
    assert path in capsys.readouterr().out


def test_no_epoch_comes_after_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SWA validates its average when training is over: that is no step of another epoch."""
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=0)
    quiet(tmp_path, max_epochs=2, callbacks=swa, enable_progress_bar=True).fit(Line(), loader(8), loader(5))
    said = capsys.readouterr()
    assert "2/2" in said.out + said.err
    assert "3/2" not in said.out + said.err


class Buffers(Line):
    """Has a buffer of its own."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.model.register_buffer("mask", buffer, persistent=False)


def test_an_expanded_buffer_gets_memory_of_its_own(tmp_path: Path) -> None:
    """Ranks send it to one another, and an average copies it."""

    def one(engine: ThreadEngine) -> Any:
        task = Buffers(torch.ones(1, 3).expand(4, 3))
        quiet(tmp_path, engine=engine, callbacks=EMA()).fit(task, loader(8), loader(4))
        return task.model.mask, set(task.state_dict())

    for mask, names in World(2).run(one):
        assert torch.equal(mask, torch.ones(4, 3)) and mask.is_contiguous()
        assert names == {"model.weight", "model.bias"}


def test_a_sparse_buffer_is_refused_at_several_ranks(tmp_path: Path) -> None:
    """By name; one process trains with it."""
    quiet(tmp_path / "one").fit(Buffers(torch.eye(3).to_sparse()), loader(8))

    def one(engine: ThreadEngine) -> str:
        with pytest.raises(TaskError) as raised:
            quiet(tmp_path / "two", engine=engine).fit(Buffers(torch.eye(3).to_sparse()), loader(8))
        return str(raised.value)

    assert "The buffer 'model.mask' of Buffers is sparse" in World(2).run(one)[0]
