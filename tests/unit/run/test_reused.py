"""What a process of an elastic run makes once."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.helpers.toy import Line
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import read_optimizers
from trainkit.optim.schedule import LearningRates
from trainkit.run.reused import Made, ReusedParts

PLAN = BatchPlan(4, 2, 1, "linear", None, 0)


class Making:
    """Makes an optimizer with a schedule for a task, and counts."""

    def __init__(self, task: Line, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        self.task, self.kind, self.times = task, kind, 0

    def __call__(self) -> Made:
        """Make them."""
        self.times += 1
        optimizer = self.kind(self.task.parameters(), lr=0.1)  # type: ignore[call-arg]
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
        return read_optimizers(
            {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        )


def used(made: Made, task: Line) -> list[float]:
    """Train some steps; return the rates."""
    rates = LearningRates(*made, PLAN)
    found = []
    for step in range(1, 4):
        task.model(torch.ones(2, 3)).sum().backward()
        made[0][0].step()
        rates.after_step(step)
        found.append(rates.groups[0]["lr"])
    return found


def test_optimizers_are_used_again_as_they_were_made() -> None:
    """Rates that were scaled are not scaled twice, and the momenta are gone."""
    task, kept = Line(), ReusedParts()
    make = Making(task)
    first = used(kept.optimizers(task, PLAN, make), task)
    again = kept.optimizers(task, PLAN, make)
    assert not again[0][0].state
    assert used(again, task) == first
    assert make.times == 1
    kept.close()


def test_a_state_that_an_optimizer_begins_with_is_kept_as_it_was() -> None:
    """Adagrad's sums are there before the first step, and steps add to them in place."""
    task, kept = Line(), ReusedParts()
    make = Making(task, torch.optim.Adagrad)
    for _ in range(3):
        (optimizer,), schedules = kept.optimizers(task, PLAN, make)
        assert [float(state["sum"].sum()) for state in optimizer.state.values()] == [0.0, 0.0]
        used(([optimizer], schedules), task)
    assert make.times == 1


def test_they_are_made_again_for_another_plan_or_other_parameters() -> None:
    """A group that was added in training, another layer, another number of ranks."""
    task, kept = Line(), ReusedParts()
    make = Making(task)
    (optimizer,), _ = kept.optimizers(task, PLAN, make)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    kept.optimizers(task, PLAN, make)
    assert make.times == 2
    kept.optimizers(task, replace(PLAN, world_size=3), make)
    assert make.times == 3
    task.model = torch.nn.Linear(3, 1)
    kept.optimizers(task, replace(PLAN, world_size=3), make)
    assert make.times == 4
