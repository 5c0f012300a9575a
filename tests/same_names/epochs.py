"""Behaviours of an epoch's end: what is reset, validated and moved, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import differs, equal


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


@equal
def gathered_graph(kit: Framework) -> Any:
    """all_gather at one rank leaves a tensor's graph, also with sync_grads=True."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x = self.all_gather(self(batch[0]), sync_grads=batch_idx == 1)
        return (x - batch[1]).pow(2).mean()

    task = kit.line(training_step=training_step)
    kit.trainer(max_steps=3).fit(task, data())
    return weights(task)
