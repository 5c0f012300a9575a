"""Resuming inside an epoch restores logged values, counts and random numbers:
the same bits, the same rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import BinaryAUROC

from tests.helpers.resuming import BreaksOff, BrokenOffError, assert_same_run, newest
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, Recorder, loader, quiet, rows
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint import format as ckpt
from trainkit.errors import CheckpointError
from trainkit.loggers import CSVLogger
from trainkit.trainer import Trainer


class Logs(Net):
    """Dropout and batch norm, and all kinds of logged values;
    of two metric objects one stores all samples.
    """

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.error, self.auroc = torchmetrics.MeanAbsoluteError(), BinaryAUROC(thresholds=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log all of it."""
        loss, (x, y) = super().training_step(batch, batch_idx), batch
        out = self(x).detach()
        self.error(out, y)
        self.auroc.update(out[:, 0].sigmoid(), (y[:, 0] > 0).long())
        self.log("train/both", loss, on_step=True, on_epoch=True)
        for reduction in ("mean", "sum", "min", "max"):
            self.log(
                f"train/{reduction}", out.mean(), on_step=False, on_epoch=True, reduce_fx=reduction
            )
        self.log("train/samples", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train/number", float(y[0]), on_step=False, on_epoch=True)
        self.log("train/error", self.error, on_step=True, on_epoch=True)
        self.log("train/auroc", self.auroc, on_step=False, on_epoch=True)
        return loss


class PlainLogs(Logs):
    """The same without random numbers, and without statistics of one rank's batch."""

    make_model = Line.make_model


def begin(
    folder: Path,
    make: Callable[[], Any] = Logs,
    breaks: BreaksOff | None = None,
    data: Any = None,
    **settings: Any,
) -> Trainer:
    """Train two epochs of 11 microbatches and 6 steps, with a checkpoint each third step,
    from "auto"; return the trainer.
    """
    keeper = ModelCheckpoint(every_n_train_steps=settings.pop("every", 3), every_n_epochs=None)
    own = settings.pop("callbacks", [])
    callbacks = [*own, keeper] if breaks is None else [*own, breaks, keeper]
    known: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "accumulate_grad_batches": 2,
        "logger": CSVLogger(),
    }
    trainer = quiet(folder, callbacks=callbacks, **(known | settings))
    trainer.fit(
        make(), loader(32, 3, shuffle=True) if data is None else data(), loader(5), ckpt_path="auto"
    )
    return trainer


def broken_off(folder: Path, breaks: BreaksOff, *args: Any, **settings: Any) -> Trainer:
    """Start a run, interrupt it, and resume it."""
    with pytest.raises(BrokenOffError):
        begin(folder, *args, breaks=breaks, **settings)
    torch.rand(9)  # whatever happened in between
    return begin(folder, *args, **settings)


@pytest.mark.parametrize("fold_at", [4, 64])
@pytest.mark.parametrize(
    "breaks",
    [
        pytest.param((4, "step"), id="a step after a checkpoint"),
        pytest.param((5, "step"), id="two steps after it"),
        pytest.param((6, "validation"), id="in the validation after the epoch's last step"),
        pytest.param((7, "step"), id="in the next epoch"),
    ],
)
def test_an_epochs_values_are_the_same_bits_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: tuple[int, str], fold_at: int
) -> None:
    """Means, sums, minima, maxima and metric objects of an epoch do not depend on an interruption;
    no row is written twice.
    """
    monkeypatch.setattr("trainkit.metrics.log._FOLD_AT", fold_at)
    whole = begin(tmp_path / "whole")
    parts = broken_off(tmp_path / "parts", BreaksOff(*breaks))
    assert parts.callback_metrics == whole.callback_metrics
    assert {
        "train/both_epoch",
        "train/sum",
        "train/error_epoch",
        "train/auroc",
    } < whole.callback_metrics.keys()
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_an_epochs_values_survive_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    """Resumed at another number of ranks,
    an epoch's values are those of the run that was not interrupted.
    """
    settings: dict[str, Any] = {
        "global_batch_size": 12,
        "lr_scaling": "none",
        "accumulate_grad_batches": None,
    }
    settings |= {"max_epochs": 1, "logger": False}

    def at(ranks: int, folder: Path, breaks: BreaksOff | None = None) -> dict[str, float]:
        def work(engine: ThreadEngine) -> dict[str, float]:
            data = loader(46, 2, shuffle=True)
            return begin(
                folder, PlainLogs, breaks, lambda: data, engine=engine, **settings
            ).callback_metrics

        first, *others = World(ranks).run(work)
        assert all(values == first for values in others)
        return {
            name: first.get(f"train/{name}", 0.0)
            for name in ("mean", "both_epoch", "samples", "error_epoch", "auroc")
        }

    whole = at(1, tmp_path / "whole")
    with pytest.raises(BrokenOffError):
        at(before, tmp_path / "parts", BreaksOff(3))
    assert at(after, tmp_path / "parts") == pytest.approx(whole, rel=1e-5)
    assert whole["samples"] == 46


@pytest.mark.parametrize("after", [4, 5, 6])
def test_a_plateau_remembers_the_validation_inside_the_epoch(tmp_path: Path, after: int) -> None:
    """Between an epoch's last validation and its end,
    a checkpoint holds the value for ReduceLROnPlateau.
    """

    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.5
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"},
            }

    settings: dict[str, Any] = {"val_check_interval": 4, "every": 1, "max_epochs": 4}
    first, second, third = Recorder(), Recorder(), Recorder()
    begin(tmp_path / "whole", Plateau, callbacks=[first], **settings)
    with pytest.raises(BrokenOffError):
        begin(tmp_path / "parts", Plateau, BreaksOff(after), callbacks=[second], **settings)
    begin(tmp_path / "parts", Plateau, callbacks=[third], **settings)
    assert second.lrs + third.lrs == first.lrs
    assert len(set(first.lrs)) > 1, "the plateau never moved"
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


class Shuffled(IterableDataset[Any]):
    """Rows in an order, and with noise, that are drawn while it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        x_NI, y_NO = rows(24).tensors
        order = list(torch.randperm(24))
        random.shuffle(order)
        for i in order:
            yield x_NI[i] + 0.1 * torch.randn(3) + float(np.random.rand()), y_NO[i]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [2, 4, 8])
def test_a_shuffled_stream_resumes_with_the_same_batches(
    tmp_path: Path, after: int, workers: int
) -> None:
    """A stream that draws its order and its noise resumes at the same batch,
    inside the first epoch and the second.
    """

    def data() -> Any:
        return DataLoader(Shuffled(), 2, num_workers=workers)

    begin(tmp_path / "whole", data=data, every=1)
    broken_off(tmp_path / "parts", BreaksOff(after), data=data, every=1)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_what_the_task_does_at_an_epochs_end_is_saved(tmp_path: Path) -> None:
    """A buffer that on_train_epoch_end changes is in the checkpoint of that epoch."""

    class Tallies(Line):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("epochs", torch.zeros(()))

        def on_train_epoch_end(self) -> None:
            self.epochs += 1

    keeper = ModelCheckpoint(save_top_k=-1)
    quiet(tmp_path, max_epochs=2, callbacks=keeper).fit(Tallies(), loader(8))
    assert [
        float(ckpt.read_state(tmp_path / "checkpoints" / f"epoch={e}-step={2 * e + 2}")["epochs"])
        for e in (0, 1)
    ] == [
        1,
        2,
    ]


def test_a_metric_that_is_no_part_of_the_task_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts of a metric object outside the Task are lost,
    which a run that resumes inside an epoch reports.
    """

    class Loose(Line):
        def __init__(self) -> None:
            super().__init__()
            self.loose = [torchmetrics.SumMetric()]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loose[0].update(len(batch[0]))
            self.log("train/count", self.loose[0])
            return super().training_step(batch, batch_idx)

    broken_off(tmp_path, BreaksOff(4), Loose)
    said = (
        "states that this run has no place for: the metric 'train/count' (make it an attribute of"
        " the Task, and it is saved)."
    )
    assert said in capsys.readouterr().out


def test_a_checkpoint_of_an_older_trainkit_is_refused_in_words(tmp_path: Path) -> None:
    """A manifest without a seal is refused; the error names its path and the missing key."""
    quiet(tmp_path, callbacks=ModelCheckpoint()).fit(Line(), loader(8))
    path = newest(tmp_path) / ckpt.MANIFEST
    about = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: value for key, value in about.items() if key != "sha256_of_this_file"})
    )
    with pytest.raises(
        CheckpointError,
        match=r"step=2 is no whole checkpoint: .*it has no sha256_of_this_file.*ckpt_path=PATH",
    ):
        quiet(tmp_path, max_epochs=2).fit(Line(), loader(8), ckpt_path=str(path.parent))


def test_a_metric_object_resumes_after_a_limit_inside_an_epoch(tmp_path: Path) -> None:
    """After max_steps inside an epoch and a resume,
    a metric object has counted all of the epoch's samples.
    """

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            self.count = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count.update(len(batch[0]))
            self.log("train/count", self.count)
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, max_steps=3, enable_checkpointing=True).fit(Counts(), loader(24))
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Counts(), loader(24), ckpt_path="last")
    assert trainer.callback_metrics["train/count"] == 24


def test_a_sparse_state_resumes_without_a_warning(tmp_path: Path) -> None:
    """A run with sparse optimizer state resumes, without a warning."""

    class Table(Line):
        def make_model(self) -> torch.nn.Module:
            return torch.nn.Embedding(6, 1, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model((x[:, 0].abs() * 2).long().clamp(max=5))

    quiet(tmp_path, max_steps=2, enable_checkpointing=True).fit(Table(momentum=0.9), loader(24))
    quiet(tmp_path, max_steps=4).fit(Table(momentum=0.9), loader(24), ckpt_path="last")


@pytest.mark.parametrize(
    "now",
    [None, torchmetrics.MaxMetric, lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())],
)
def test_a_metric_that_the_task_lacks_is_reported(
    now: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of within an epoch has its state; the Task may have none there since, or another
    kind: rank 0 alone raised.
    """

    class Own(Line):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.mean = make and make()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if isinstance(self.mean, torchmetrics.MeanMetric):
                self.mean.update(loss.detach())
            return loss

    settings = {"enable_checkpointing": True, "max_steps": 1}
    quiet(tmp_path, **settings).fit(Own(torchmetrics.MeanMetric), loader(8))
    quiet(tmp_path, max_epochs=1).fit(Own(now), loader(8), ckpt_path="last")
    said = capsys.readouterr().out
    assert "no place for: the state of the metric 'mean'. It resumes without them." in said
