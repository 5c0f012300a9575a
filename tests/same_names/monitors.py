"""Behaviours of what looks at logged values: ModelCheckpoint, EarlyStopping, a logger's axis."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.same_names.kit import Framework, data
from tests.same_names.logs import callback_fit, kept_by
from tests.same_names.table import differs, equal


def scored(scores: Sequence[float]) -> dict[str, Any]:
    """Return a validation that logs a score of each epoch."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("score", scores[self.current_epoch])

    return {"validation_step": validation_step}


def best_of(kit: Framework, scores: Sequence[float], **settings: Any) -> Any:
    """Train an epoch of five steps for each score with a ModelCheckpoint; return the names that are
    left, their scores, and which is best.
    """
    settings |= {"monitor": "score", "members": scored(scores)}
    keeper, names = kept_by(kit, len(scores), **settings)
    held = {Path(path).stem: value.item() for path, value in keeper.best_k_models.items()}
    return names, held, Path(keeper.best_model_path).stem, keeper.best_model_score.item()


@equal
def one_name(kit: Framework) -> Any:
    """ModelCheckpoint(filename="best-model", save_top_k=1): a worse epoch does not replace it."""
    return best_of(kit, (3.0, 1.0, 2.0), filename="best-model", save_top_k=1)


@equal
def one_name_for_several(kit: Framework) -> Any:
    """ModelCheckpoint(filename="m", save_top_k=3): m, m-v1, m-v2."""
    return best_of(kit, (5.0, 4.0, 3.0, 9.0, 2.0), filename="m", save_top_k=3)


@equal
def scores_within_epochs(kit: Framework) -> Any:
    """ModelCheckpoint(monitor of validations, every_n_train_steps=3), validated at epochs' ends."""
    return best_of(kit, (3.0, 1.0, 2.0), filename="{step}", every_n_train_steps=3)


@differs("There its score is that of the validation before it; here of its own.")
def scores_at_epochs_ends(kit: Framework) -> Any:
    """ModelCheckpoint(monitor of validations, every_n_train_steps=5), at epochs' last steps."""
    return best_of(kit, (3.0, 1.0, 2.0), filename="{step}", every_n_train_steps=5)


@equal
def stopping_on_a_value_of_training(kit: Framework) -> Any:
    """EarlyStopping on a value of training, with check_val_every_n_epoch=2: validations count."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("mine", 1.0, on_step=False, on_epoch=True)
        return self.loss(batch)

    stopping = kit.callbacks.EarlyStopping("mine", patience=2)
    members = {"training_step": training_step}
    settings = {"max_epochs": 20, "check_val_every_n_epoch": 2}
    trainer = callback_fit(kit, stopping, members=members, **settings)
    return trainer.global_step, stopping.stopped_epoch, stopping.wait_count


@equal
def stopping_at_a_threshold(kit: Framework) -> Any:
    """EarlyStopping(stopping_threshold=1.0) at a value of 1.0, and at a better one."""
    stopping = kit.callbacks.EarlyStopping("score", mode="max", patience=9, stopping_threshold=1.0)
    first = stopping.best_score.item()
    members = scored((0.5, 1.0, 1.0, 1.5, 2.0))
    trainer = callback_fit(kit, stopping, members=members, max_epochs=5)
    return first, trainer.global_step, stopping.wait_count, stopping.best_score.item()


def columns(kit: Framework, *names: str, **members: Any) -> Any:
    """Train two epochs with a CSVLogger; return the rows that have all these columns."""
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    trainer = kit.trainer(logger=logger, log_every_n_steps=1)
    trainer.fit(kit.line(**members), data(), data())
    with (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").open(newline="") as file:
        rows = [[row.get(name) for name in names] for row in csv.DictReader(file)]
    return [[float(cell) for cell in row if cell] for row in rows if all(row)]


@equal
def a_rate_of_the_users_own(kit: Framework) -> Any:
    """log("lr", ...) in training_step: the logger has that value."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("lr", 7.0)
        return self.loss(batch)

    return [lr for (lr,) in columns(kit, "lr", training_step=training_step)]


@equal
def an_axis_of_the_users_own(kit: Framework) -> Any:
    """log_dict({"step": the epoch, ...}) in a hook: the logger's x axis."""

    def on_validation_epoch_end(self: Any) -> None:
        self.log_dict({"step": float(self.current_epoch), "mine": 1.0 + self.current_epoch})

    return columns(kit, "step", "mine", on_validation_epoch_end=on_validation_epoch_end)


@equal
def several_values_of_a_hook(kit: Framework) -> Any:
    """Several log() of one name in on_validation_epoch_end, with each reduce_fx, and batch_size."""

    def on_validation_epoch_end(self: Any) -> None:
        for number in (1.0, 2.0, 6.0):
            self.log("plain", number)
            self.log("weighted", number, batch_size=int(number))
            for how in ("mean", "sum", "min", "max"):
                self.log(how, number, reduce_fx=how)

    trainer = kit.trainer()
    trainer.fit(kit.line(on_validation_epoch_end=on_validation_epoch_end), data(), data())
    names = ("plain", "weighted", "mean", "sum", "min", "max")
    values = [float(trainer.callback_metrics[name]) for name in names]
    assert all(map(math.isfinite, values))
    return [round(value, 4) for value in values]


@differs(
    "There a spike ends the run with an exception; here it prints the samples, and training"
    " continues: stop=True ends it. It compares with a median of 50 losses, from the tenth on, and"
    " with their deviations too."
)
def a_spike(kit: Framework) -> Any:
    """SpikeDetection() at a loss that jumps."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1e6 if self.global_step == 14 else 1.0)

    file = str(kit.folder / "skip_batches.json")
    spikes = kit.callbacks.SpikeDetection(exclude_batches_path=file)
    try:
        callback_fit(kit, spikes, members={"training_step": training_step}, max_epochs=4)
    except RuntimeError as error:
        return type(error).__name__
    return "trained on"


@differs("Here the names begin with device/, and a thread reads them beside training.")
def names_of_device_stats(kit: Framework) -> Any:
    """DeviceStatsMonitor: the names of its values."""
    return names_with(kit, kit.callbacks.DeviceStatsMonitor(cpu_stats=True))


@differs("Here the names begin with throughput/, and are of training alone.")
def names_of_throughput(kit: Framework) -> Any:
    """ThroughputMonitor: the names of its values."""
    monitor = kit.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    return names_with(kit, monitor)


def names_with(kit: Framework, callback: Any) -> list[str]:
    """Return the names that a callback adds to metrics.csv."""
    columns = []
    for version, callbacks in (("with", [callback]), ("without", [])):
        logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version=version)
        trainer = kit.trainer(logger=logger, log_every_n_steps=1, callbacks=callbacks)
        trainer.fit(kit.line(), data(), data())
        file = kit.folder / "logs" / "mine" / version / "metrics.csv"
        columns.append(set(file.read_text().splitlines()[0].split(",")))
    return sorted(columns[0] - columns[1])


@equal
def names_of_two_rates(kit: Framework) -> Any:
    """LearningRateMonitor of two optimizers of a class, of which the second has a scheduler."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self: Any) -> Any:
        first, second = (
            torch.optim.SGD([weight], lr=rate)
            for weight, rate in zip(self.parameters(), (0.01, 0.02), strict=True)
        )
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 100)]

    members: dict[str, Any] = {"automatic_optimization": False, "training_step": training_step}
    members["configure_optimizers"] = configure_optimizers
    monitor = kit.callbacks.LearningRateMonitor(logging_interval="step")
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    settings = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 1}
    trainer = callback_fit(kit, monitor, members=members, **settings)
    names = ("lr-SGD", "lr-SGD-1")
    return [round(float(trainer.callback_metrics[name]), 4) for name in names]
