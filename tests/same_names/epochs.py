"""Behaviours of an epoch's end: what is reset, validated and moved, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.same_names.kit import Framework, data
from tests.same_names.table import equal


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
