"""A step that a rank runs once for each of its stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainkit
from trainkit.api.task import LogTarget
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.repeated import Repeated
from trainkit.metrics.log import MetricLog


class Own(trainkit.Task):
    """Has a buffer of its own, and a layer with one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.zeros(()))
        self.record = MetricLog()
        self._log_to(LogTarget(self.record, 1, on_step=True, on_epoch=False))

    def run(self, change: Any, again: bool, batch: Any) -> None:
        """Run a pass of a step that changes something."""
        repeated = Repeated(self, [self.layer])
        with repeated.one_of_several("training_step", (batch,), {}, again) as (args, _):
            self.log("value", 1.0)
            change(self, args[0])


def test_one_pass_logs() -> None:
    """The last one of several."""
    task = Own()
    task.run(lambda own, batch: None, True, {"x": torch.ones(2)})
    assert not task.record.step_values()
    task.run(lambda own, batch: None, False, {"x": torch.ones(2)})
    assert set(task.record.step_values()) == {"value"}


def test_each_pass_has_lists_and_dicts_of_its_own() -> None:
    """A step may take something out."""
    batch = {"x": torch.ones(2)}
    Own().run(lambda own, given: given.pop("x"), True, batch)
    assert set(batch) == {"x"}


def in_batch(own: Own, batch: dict[str, Tensor]) -> None:
    """Write to the batch."""
    batch["x"] /= 2


def in_buffer(own: Own, batch: dict[str, Tensor]) -> None:
    """Write to the Task's buffer."""
    own.steps += 1


def in_layer(own: Own, batch: dict[str, Tensor]) -> None:
    """Write to a buffer of a layer, which one pass computes."""
    own.layer.num_batches_tracked += 1


@pytest.mark.parametrize(("change", "what"), [(in_batch, "its batch"), (in_buffer, "'steps'")])
def test_what_a_pass_must_not_change_is_refused(change: Any, what: str) -> None:
    """The next pass would change it again; after the last one none does."""
    with pytest.raises(TaskError, match=rf"Own.training_step writes to {what}, and a rank runs"):
        Own().run(change, True, {"x": torch.ones(2)})
    Own().run(change, False, {"x": torch.ones(2)})
    Own().run(in_layer, True, {"x": torch.ones(2)})
