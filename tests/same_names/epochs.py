"""Behaviours of an epoch's end: what is reset, validated and moved, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import differs, equal, refused


@equal
def metric_of_steps_alone(kit: Framework) -> Any:
    """A torchmetrics object that is logged with on_step=True, on_epoch=False, computed at an epoch's
    end: it is reset after it.
    """
    torchmetrics = pytest.importorskip("torchmetrics")
    seen: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.mean(10.0 * self.current_epoch + batch_idx)
        self.log("mean", self.mean, on_step=True, on_epoch=False)
        return self.loss(batch)

    def on_train_epoch_end(self: Any) -> None:
        seen.append(self.mean.compute().item())

    task = kit.line(training_step=training_step, on_train_epoch_end=on_train_epoch_end)
    task.mean = torchmetrics.MeanMetric()
    kit.trainer(max_epochs=3).fit(task, data(), data())
    return seen


def ended_at(kit: Framework, first: int, **members: Any) -> Any:
    """Train three epochs, of which the second ends before a batch; return the epochs' ends, and the
    steps at which there were validations.
    """
    ends: list[int] = []
    validated: list[int] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> Any:
        return -1 if (self.current_epoch, batch_idx) == (1, first) else None

    task = kit.line(
        on_train_batch_start=on_train_batch_start,
        on_train_epoch_end=lambda self: ends.append(self.current_epoch),
        on_validation_start=lambda self: validated.append(self.trainer.global_step),
        **members,
    )
    trainer = kit.trainer(max_epochs=3)
    trainer.fit(task, data(), data())
    return ends, validated, trainer.global_step, trainer.current_epoch, weights(task)


@equal
def first_batch_ends_the_epoch(kit: Framework) -> Any:
    """on_train_batch_start that returns -1 at an epoch's first batch ends that epoch."""
    return ended_at(kit, 0)


@differs("There no validation follows; here each epoch that has trained ends with its validation.")
def validation_of_an_epoch_that_a_hook_ends(kit: Framework) -> Any:
    """Validation after an epoch that ends early since on_train_batch_start returns -1."""
    return ended_at(kit, 2)


@differs(
    "There the last value, of the last batch; here their mean, weighted by samples: that of the step."
    " Log under another name, or with reduce_fx."
)
def values_of_one_step(kit: Framework) -> Any:
    """Several log calls of one name in a step, also of accumulate_grad_batches: the step's value."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("x", float(batch_idx))
        return self.loss(batch)

    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    trainer = kit.trainer(logger=logger, max_epochs=1, **settings)
    trainer.fit(kit.line(training_step=training_step), data(32))
    rows = (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("x")
    return [float(row.split(",")[place]) for row in rows[1:] if row.split(",")[place]]


@differs(
    "There a scheduler of epochs, but ReduceLROnPlateau, moves before the validation at the epoch's"
    " end; here after it, so that the validation sees the rate that the epoch was trained with."
)
def rate_in_a_validation(kit: Framework) -> Any:
    """The rate that the validation at an epoch's end sees."""
    rates: list[float] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_validation_start(self: Any) -> None:
        rates.append(self.optimizers().param_groups[0]["lr"])

    members = {"configure_optimizers": configure_optimizers}
    task = kit.line(on_validation_start=on_validation_start, **members)
    kit.trainer(max_epochs=3).fit(task, data(), data())
    return rates


def plateau(kit: Framework, **config: Any) -> Any:
    """Train with a ReduceLROnPlateau on a value that on_train_epoch_end logs; return the rate."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "mine", **config},
        }

    task = kit.line(
        configure_optimizers=configure_optimizers,
        on_train_epoch_end=lambda self: self.log("mine", 1.0),
    )
    trainer = kit.trainer(max_epochs=4)
    trainer.fit(task, data())
    return trainer.optimizers[0].param_groups[0]["lr"]


@refused("scheduler moves before on_train_epoch_end")
def plateau_on_a_value_of_an_epochs_end(kit: Framework) -> Any:
    """ReduceLROnPlateau on a value that on_train_epoch_end logs."""
    return plateau(kit)


@differs(
    "There it moves after on_train_epoch_end; here before it, so it never has the value, as a line says."
    " Log the value in training_step with on_epoch=True, or in validation."
)
def lenient_plateau_on_a_value_of_an_epochs_end(kit: Framework) -> Any:
    """The same with `"strict": False`."""
    return plateau(kit, strict=False)


def made(kit: Framework, precision: str) -> Any:
    """Return the dtype of a tensor that training_step makes."""
    seen: set[str] = set()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.add(str(torch.zeros(1).dtype))
        return self.loss(batch)

    kit.trainer(precision=precision, max_steps=1).fit(kit.line(training_step=training_step), data())
    return sorted(seen)


_MADE = (
    "There the default dtype is {} within a step; here float32 as everywhere. Write torch.zeros(...,"
    " dtype=self.dtype), or torch.zeros_like(x)."
)


@differs(_MADE.format("float64"))
def made_in_64_true(kit: Framework) -> Any:
    """The dtype of torch.zeros(1) in a step, with precision="64-true"."""
    return made(kit, "64-true")


@differs(_MADE.format("bfloat16"))
def made_in_bf16_true(kit: Framework) -> Any:
    """The dtype of torch.zeros(1) in a step, with precision="bf16-true"."""
    return made(kit, "bf16-true")


@equal
def gathered_graph(kit: Framework) -> Any:
    """all_gather at one rank leaves a tensor's graph, also with sync_grads=True."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x = self.all_gather(self(batch[0]), sync_grads=batch_idx == 1)
        return (x - batch[1]).pow(2).mean()

    task = kit.line(training_step=training_step)
    kit.trainer(max_steps=3).fit(task, data())
    return weights(task)


def hooks_of_a_cut_epoch(kit: Framework, **settings: Any) -> Any:
    """Return the epochs' ends of a fit that a limit cuts."""
    ends: list[int] = []
    task = kit.line(on_train_epoch_end=lambda self: ends.append(self.trainer.global_step))
    kit.trainer(**settings).fit(task, data())
    return ends


@differs(
    "There it is called for the epoch that max_steps, max_time or a stop cuts too; here for whole epochs,"
    " since a run with a higher limit resumes within that one. A line says so; on_train_end is"
    " called in any case."
)
def end_of_a_cut_epoch(kit: Framework) -> Any:
    """on_train_epoch_end of an epoch that max_steps cuts."""
    return hooks_of_a_cut_epoch(kit, max_steps=7)
