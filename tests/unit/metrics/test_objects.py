"""torchmetrics objects in `log`: the value of all ranks is that of one that saw all samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import torchmetrics as tm
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import StochasticWeightAveraging
from trainkit.errors import TaskError
from trainkit.metrics.log import MetricLog


def samples(count: int = 50) -> tuple[Tensor, Tensor]:
    """Return scores of 3 classes and targets, always the same."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(count, 3, generator=generator), torch.randint(
        0, 3, (count,), generator=generator
    )


class Masks(torchmetrics.Metric):
    """Holds masks as MeanAveragePrecision(iou_type="segm") does: tuples of sizes and bytes."""

    masks: list[tuple[tuple[int, int], bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("masks", default=[], dist_reduce_fx=None)

    def update(self, scores: Tensor) -> None:
        self.masks += [((1, 3), (row > 0.5).numpy().tobytes()) for row in scores]

    def compute(self) -> Tensor:
        """Return the mean number of pixels of a mask."""
        return torch.tensor(sum(sum(pixels) for _, pixels in self.masks) / len(self.masks))


# metric, and what of the samples it takes
METRICS: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], tuple[Tensor, ...]]]] = {
    "accuracy": (lambda: MulticlassAccuracy(3), lambda s, t: (s, t)),
    "macro f1": (lambda: MulticlassF1Score(3), lambda s, t: (s, t)),
    "auroc, which keeps all samples": (
        lambda: BinaryAUROC(thresholds=None),
        lambda s, t: (s[:, 0], (t > 0).long()),
    ),
    "pearson, with a reduction of its own": (tm.PearsonCorrCoef, lambda s, t: (s[:, 0], s[:, 1])),
    "mean": (tm.MeanMetric, lambda s, t: (s[:, 0], t + 1.0)),
    "max": (tm.MaxMetric, lambda s, t: (s,)),
    "masks, which are no tensors": (Masks, lambda s, t: (s,)),
    "squared error": (tm.MeanSquaredError, lambda s, t: (s[:, 0], s[:, 1])),
}


def on_ranks(
    shares: list[list[slice]], make: Callable[[], Any], take: Any
) -> list[dict[str, float]]:
    """Log a metric on as many ranks (threads) as there are shares; return the value on each."""
    barrier, box = threading.Barrier(len(shares)), [None] * len(shares)
    results: list[dict[str, float]] = [{} for _ in shares]

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            barrier.wait(10)
            box[rank] = value
            barrier.wait(10)
            return list(box)

        table, metric = MetricLog(), make()
        for batch in shares[rank]:
            metric(*take(*(t[batch] for t in samples())))
            table.add("value", metric, weight=1, on_step=False, on_epoch=True)
        results[rank] = table.epoch_values(gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


@pytest.mark.parametrize(("make", "take"), METRICS.values(), ids=METRICS)
def test_the_value_is_that_of_one_rank_with_all_samples(make: Callable[[], Any], take: Any) -> None:
    """Uneven shares, a rank with a single batch and one without any change nothing."""
    whole = make()
    whole.update(*take(*samples()))
    shares = [[slice(0, 20), slice(20, 31)], [slice(31, 50)], []]
    expected = pytest.approx(float(whole.compute()), rel=1e-5)
    assert on_ranks(shares, make, take) == [{"value": expected}] * 3


class Classes(Line):
    """Logs an accuracy object and its plain values, in training and validation."""

    def __init__(self, metric: Any | None = None) -> None:
        super().__init__()
        self.accuracy = tm.classification.BinaryAccuracy() if metric is None else metric
        self.steps: list[float] = []

    def _log(self, batch: Any, stage: str, **options: Any) -> None:
        x, y = batch
        hits = ((self(x) > 0) == (y > 0)).float()
        self.accuracy((self(x) > 0).long(), (y > 0).long())
        self.log(f"{stage}/object", self.accuracy, prog_bar=True, **options)
        self.log(f"{stage}/plain", hits.mean(), on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log by epoch and by step."""
        self._log(batch, "train", on_step=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log by epoch."""
        self._log(batch, "val")


def test_objects_equal_plain_values_in_a_run(tmp_path: Path) -> None:
    """Each epoch's value is its own: the object is reset; sanity batches do not count."""
    run = quiet(tmp_path, max_epochs=3, log_every_n_steps=1)
    task = Classes()
    run.fit(task, loader(23), loader(9))
    values = run.callback_metrics
    assert values["val/object"] == pytest.approx(values["val/plain"])
    assert values["train/object_epoch"] == pytest.approx(values["train/plain"])
    assert not any("accuracy" in key for key in task.state_dict())
    assert run.validate(task, loader(9))["val/object"] == pytest.approx(values["val/plain"])


def test_a_collection_is_logged_by_its_names(tmp_path: Path) -> None:
    """log_dict takes a MetricCollection."""

    class Many(Line):
        def __init__(self) -> None:
            super().__init__()
            self.many = tm.MetricCollection(
                [tm.MeanSquaredError(), tm.MeanAbsoluteError()], prefix="val/"
            )

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.many.update(self(batch[0]), batch[1])
            self.log_dict(self.many)
            self.log("val/plain", (self(batch[0]) - batch[1]).square().mean())

    values = quiet(tmp_path).validate(Many(), loader(11))
    assert set(values) == {"val/MeanSquaredError", "val/MeanAbsoluteError", "val/plain"}
    assert values["val/MeanSquaredError"] == pytest.approx(values["val/plain"])


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    """A matrix, and a step value of a metric that was only updated, are refused with a remedy."""

    class Updates(Line):
        def __init__(self) -> None:
            super().__init__()
            self.metric = tm.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(1.0)
            self.log("mean", self.metric, on_step=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(TaskError, match="no value of this batch. Call it"):
        quiet(tmp_path).fit(Updates(), loader(8))


def test_one_name_is_one_object(tmp_path: Path) -> None:
    """Two objects under one name are refused."""
    table = MetricLog()
    table.add("a", tm.MeanMetric(), weight=1, on_step=False, on_epoch=True)
    with pytest.raises(TaskError, match=r"log\('a', \.\.\.\) got another metric object"):
        table.add("a", tm.MeanMetric(), weight=1, on_step=False, on_epoch=True)


def test_splitting_a_step_refuses_objects_in_training(tmp_path: Path) -> None:
    """An object has counted the samples of a retried step, and cannot undo it."""

    class Tight(Classes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

    with pytest.raises(
        TaskError, match=r"Tight\.training_step logs train/object_epoch as metric objects"
    ):
        quiet(tmp_path, halve_batch_on_oom=True).fit(Tight(), loader(8))


class Counts(Line):
    """Counts its samples by a metric object."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.counter, self.breaks = torchmetrics.SumMetric(), breaks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Count."""
        self.counter.update(len(batch[0]))
        self.log("count", self.counter)
        if self.breaks and batch_idx == 2:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def test_metric_objects_are_reset_with_a_run(tmp_path: Path) -> None:
    """What a run that broke off has counted, or SWA's pass over the data, is not the next run's."""
    task = Counts(breaks=True)
    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path).fit(task, loader(24))
    task.breaks = False
    second = quiet(tmp_path)
    second.fit(task, loader(24))
    assert second.callback_metrics["count"] == 24

    class Normed(Counts):
        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    normed = Normed()
    swa = quiet(tmp_path, max_epochs=2, callbacks=StochasticWeightAveraging(0.1, swa_epoch_start=1))
    swa.fit(normed, loader(24))
    assert not normed.counter.update_called


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


def test_a_metric_of_one_process_is_what_torchmetrics_makes_of_it(tmp_path: Path) -> None:
    """A state without a reduction is stacked over ranks, and left alone where there is one."""

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
