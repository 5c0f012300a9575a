"""Values logged in hooks: any hook of Task and Callback, the same on all ranks,
seen by what monitors them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch import Tensor

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet, rows
from trainkit.api.callback import Callback
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import TaskError


class Writes(Callback):
    """Keeps what loggers would write."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_metrics(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        """Keep the values."""
        self.rows.append((step, metrics))


class Epochs(Line):
    """Logs as Lightning's templates do:
    metric objects updated in steps, computed and reset in the epoch's hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error = tm.MeanSquaredError()
        self.train_error = tm.MeanSquaredError()
        self.best = tm.MinMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Update the metric of training."""
        x, y = batch
        self.train_error.update(self(x), y)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """Log it."""
        self.log("train/error", self.train_error.compute(), prog_bar=True)
        self.train_error.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Update the metric of validation, and log the plain value."""
        x, y = batch
        self.error.update(self(x), y)
        self.log("val/plain", (self(x) - y).square().mean())

    def on_validation_epoch_end(self) -> None:
        """Log it, and its best value so far."""
        error = self.error.compute()
        self.best.update(error)
        self.log("val/error", error, sync_dist=True)
        self.log_dict({"val/best": self.best.compute()})
        self.error.reset()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metrics_computed_in_an_epochs_hook_are_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    """`compute()` sees the samples of all ranks, also if a rank has none,
    and each epoch begins at nothing.
    """

    def work(engine: ThreadEngine) -> dict[str, float]:
        trainer = quiet(tmp_path, engine=engine, max_epochs=2)
        trainer.fit(Epochs(), loader(24), loader(2, batch_size=1))
        return dict(trainer.callback_metrics)

    for found in World(ranks).run(work):
        assert found["val/error"] == pytest.approx(found["val/plain"])
        assert found["val/best"] == pytest.approx(found["val/error"])
        assert found["train/error"] < 20  # of the last epoch alone


def test_a_metric_that_is_not_reset_keeps_each_ranks_own_samples(tmp_path: Path) -> None:
    """A metric over all epochs counts each sample once, however often it is computed."""

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            self.seen = tm.SumMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.update(float(len(batch[0])))

        def on_validation_end(self) -> None:
            self.log("seen", self.seen.compute())

    def work(engine: ThreadEngine) -> float:
        trainer = quiet(tmp_path, engine=engine, max_epochs=3, num_sanity_val_steps=0)
        trainer.fit(Counts(), loader(8), loader(7))
        return trainer.callback_metrics["seen"]

    assert World(2).run(work) == [21.0, 21.0]


def test_a_value_of_a_hook_is_rank_0s_or_reduced(tmp_path: Path) -> None:
    """Without sync_dist rank 0's value holds on all ranks; with it, the ranks' mean or sum."""

    class Ranks(Line):
        def on_train_epoch_end(self) -> None:
            rank = float(self.trainer.global_rank)
            self.log("own", rank + 5)
            self.log("mean", rank, sync_dist=True)
            self.log("sum", rank, sync_dist=True, reduce_fx="sum")
            if rank == 2:
                self.log("third", 9.0)

    def work(engine: ThreadEngine) -> dict[str, float]:
        trainer = quiet(tmp_path, engine=engine)
        trainer.fit(Ranks(), loader(24))
        return dict(trainer.callback_metrics)

    assert World(3).run(work) == [{"own": 5.0, "mean": 1.0, "sum": 3.0, "third": 9.0}] * 3


def test_several_values_of_a_name_are_combined(tmp_path: Path) -> None:
    """As `reduce_fx` says: those of rank 0, and with sync_dist those of all ranks."""

    class Several(Line):
        def on_train_epoch_end(self) -> None:
            for number in range(1 + self.trainer.global_rank):
                value = 10.0 * self.trainer.global_rank + number
                self.log("own", value + 1)
                self.log("mean", value, sync_dist=True)
                self.log("max", value, sync_dist=True, reduce_fx="max")

    def work(engine: ThreadEngine) -> dict[str, float]:
        trainer = quiet(tmp_path, engine=engine)
        trainer.fit(Several(), loader(24))
        return dict(trainer.callback_metrics)

    assert World(2).run(work) == [{"own": 1.0, "mean": 7.0, "max": 11.0}] * 2


def test_a_batch_size_weighs_means_alone(tmp_path: Path) -> None:
    """As in a step; a sum, minimum or maximum takes each value as it is."""

    class Weighed(Line):
        def on_train_epoch_end(self) -> None:
            for value, batch_size in ((3.0, 4), (6.0, 2)):
                self.log("mean", value, batch_size=batch_size)
                self.log("sum", value, reduce_fx="sum", batch_size=batch_size)
                self.log("max", value, reduce_fx="max", batch_size=batch_size)

    trainer = quiet(tmp_path)
    trainer.fit(Weighed(), loader(8))
    assert dict(trainer.callback_metrics) == {"mean": 4.0, "sum": 9.0, "max": 6.0}


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -1.0])
def test_a_step_of_the_users_own_is_a_number(tmp_path: Path, step: float) -> None:
    """A value logged as "step" is the loggers' step: one that is none is refused by its name."""

    class Steps(Line):
        def on_train_epoch_end(self) -> None:
            self.log("step", step)

    with pytest.raises(TaskError, match=rf"log\('step', ...\) is .*: 0 or more, and not {step}\."):
        quiet(tmp_path).fit(Steps(), loader(8))


def test_what_hooks_log_is_monitored(tmp_path: Path) -> None:
    """EarlyStopping and ModelCheckpoint see a value that the Task
    or a callback logs in the same hook.
    """

    class Scores(Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            self.log("score", float(trainer.current_epoch in (1, 3)))

    keeper, stop = (
        ModelCheckpoint(monitor="score", mode="max"),
        EarlyStopping("score", mode="max", patience=1),
    )
    quiet(tmp_path, callbacks=[stop, keeper, Scores()], max_epochs=5).fit(Line(), loader(8))
    assert Path(keeper.best_model_path).name == "epoch=1-step=4"
    assert stop.best_score == 1.0
    assert stop.wait_count == 1


def test_any_hook_may_log(tmp_path: Path) -> None:
    """Values of a step's hooks are written if the step is logged;
    those of the run's hooks at once.
    """

    class Everywhere(Line):
        def on_fit_start(self) -> None:
            self.log("fit", 1.0)

        def on_train_epoch_start(self) -> None:
            self.log("epoch", 2.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch", 3.0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", torch.tensor(4.0))

        def on_train_end(self) -> None:
            self.log("end", 5.0)

    writes = Writes()
    quiet(tmp_path, callbacks=writes, log_every_n_steps=2).fit(Everywhere(), loader(16))
    written = {
        name: [step for step, row in writes.rows if name in row]
        for name in ("fit", "epoch", "batch", "norm", "end")
    }
    assert written == {"fit": [0], "epoch": [0], "batch": [2, 4], "norm": [2, 4], "end": [4]}


def test_values_of_the_sanity_check_are_not_kept(tmp_path: Path) -> None:
    """What is logged while a few batches are tried is no value of the run."""
    writes = Writes()
    quiet(tmp_path, callbacks=writes, max_epochs=1, num_sanity_val_steps=1).fit(
        Epochs(), loader(8), loader(4)
    )
    assert [step for step, row in writes.rows if "val/error" in row] == [2]


class Pictured(Line):
    """Logs a picture in validation."""

    shape = (2, 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log one."""
        self.log_image("pair", torch.zeros(self.shape))


def test_the_sanity_check_tries_what_is_no_number(tmp_path: Path) -> None:
    """A picture of a wrong shape ends the run before its first step; a good one is not stored."""
    seen: list[int] = []

    class Stores(Callback):
        stores_media = True

        def on_media(self, trainer: Any, task: Any, media: Any, step: int) -> None:
            seen.append(step)

    def fit(task: Line) -> None:
        trainer = quiet(tmp_path, callbacks=Stores(), max_epochs=1, num_sanity_val_steps=1)
        trainer.fit(task, loader(8), loader(4))

    wrong = Pictured()
    wrong.shape = (2, 2, 2, 2)
    wrong.training_step = pytest.fail  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"log_image\('pair', ...\) got shape"):
        fit(wrong)
    fit(Pictured())
    assert seen and min(seen) > 0


def test_several_numbers_are_logged_by_name(tmp_path: Path) -> None:
    """Dicts, vectors, matrices, collections,
    class-wise and tracked metrics give a value for each number.
    """

    class Many(Line):
        def __init__(self) -> None:
            super().__init__()
            accuracy = tm.classification.MulticlassAccuracy(2, average=None)
            self.by_class = tm.ClasswiseWrapper(accuracy, labels=["cat", "dog"])
            self.matrix = tm.classification.BinaryConfusionMatrix()
            self.both = tm.MetricCollection(
                {"mse": tm.MeanSquaredError(), "mae": tm.MeanAbsoluteError()}
            )
            self.range = tm.MinMaxMetric(tm.MeanSquaredError())
            self.tracked = tm.MetricTracker(tm.MeanSquaredError())

        def on_validation_start(self) -> None:
            self.tracked.increment()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            predicted, truth = (self(x) > 0).long()[:, 0], (y > 0).long()[:, 0]
            self.by_class.update(predicted, truth)
            self.matrix.update(predicted, truth)
            for metric in (self.both, self.range, self.tracked):
                metric.update(self(x), y)
            self.log("acc", self.by_class)
            self.log("matrix", self.matrix)
            self.log("both", self.both)
            self.log("range", self.range)
            self.log("tracked", self.tracked)
            self.log("vector", x.mean(0))
            self.log("dict", {"a": x.mean(), "b": 1.0})

    def work(engine: ThreadEngine) -> dict[str, float]:
        return quiet(tmp_path, engine=engine).validate(Many(), loader(12))

    (alone,), pair = World(1).run(work), World(2).run(work)
    assert pair == [pytest.approx(alone)] * 2
    assert {f"matrix/{i}/{j}" for i in range(2) for j in range(2)} < alone.keys()
    assert sum(value for name, value in alone.items() if name.startswith("matrix/")) == 12
    assert {
        "vector/0",
        "vector/1",
        "vector/2",
        "dict/a",
        "dict/b",
        "both/mse",
        "both/mae",
        "tracked",
    } < alone.keys()
    assert alone["vector/1"] == pytest.approx(float(rows(12).tensors[0][:, 1].mean()))
    assert {name for name in alone if name.startswith(("acc/", "range/"))} == {
        "acc/multiclassaccuracy_cat",
        "acc/multiclassaccuracy_dog",
        "range/raw",
        "range/min",
        "range/max",
    }
