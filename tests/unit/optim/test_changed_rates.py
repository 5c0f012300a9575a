"""A run that is resumed with another rate in its optimizer or its scheduler: the rates are those of
a run that had it from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as sched

from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig
from trainkit.optim.schedule import LearningRates

STOP, STEPS = 3, 8
Make = Callable[[Optimizer], Any]


def made(make: Make, lr: float, ranks: int, interval: Any = "step") -> tuple[SGD, LearningRates]:
    """Return an optimizer and its rates."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    plan = BatchPlan(1, ranks, 1, "linear", None, 0)
    return optimizer, LearningRates([optimizer], [ScheduleConfig(make(optimizer), interval)], plan)


def train(optimizer: SGD, rates: LearningRates, start: int, stop: int) -> list[float]:
    """Return the rate of each step."""
    seen = []
    for step in range(start, stop):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        rates.after_step(step + 1)
    return seen


def resumed(
    before: tuple[SGD, LearningRates], after: tuple[SGD, LearningRates], stop: int = STOP
) -> LearningRates:
    """Train the first up to a step, and resume with the second."""
    train(*before, 0, stop)
    after[0].load_state_dict(before[0].state_dict())
    after[1].load_state_dict(before[1].state_dict(), stop)
    return after[1]


def one_cycle(o: Optimizer, max_lr: float, div_factor: float, final_div_factor: float = 1e4) -> Any:
    """Return a schedule whose rates are in the optimizer's groups."""
    return sched.OneCycleLR(
        o,
        max_lr,
        total_steps=STEPS,
        div_factor=div_factor,
        final_div_factor=final_div_factor,
        cycle_momentum=False,
    )


def sequence(o: Optimizer, eta_min: float) -> Any:
    """Return a cosine inside another schedule."""
    parts = [sched.ConstantLR(o, 0.5, 1), sched.CosineAnnealingLR(o, STEPS, eta_min)]
    return sched.SequentialLR(o, parts, [1])


# before and after, each with the optimizer's rate
CHANGES: dict[str, tuple[tuple[Make, float], tuple[Make, float], str]] = {
    "the optimizer's": (
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.01), 0.1),
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.01), 0.2),
        "lr 0.1 -> 0.2",
    ),
    "the optimizer's and the cosine's": (
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.01), 0.1),
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.02), 0.2),
        "lr 0.1 -> 0.2; CosineAnnealingLR.eta_min 0.01 -> 0.02",
    ),
    "the cosine's": (
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.01), 0.1),
        (lambda o: sched.CosineAnnealingLR(o, STEPS, 0.02), 0.1),
        "CosineAnnealingLR.eta_min 0.01 -> 0.02",
    ),
    "of restarts": (
        (lambda o: sched.CosineAnnealingWarmRestarts(o, STEPS, eta_min=0.01), 0.1),
        (lambda o: sched.CosineAnnealingWarmRestarts(o, STEPS, eta_min=0.02), 0.1),
        "CosineAnnealingWarmRestarts.eta_min 0.01 -> 0.02",
    ),
    "in a sequence": (
        (lambda o: sequence(o, 0.01), 0.1),
        (lambda o: sequence(o, 0.02), 0.1),
        "SequentialLR.schedulers[1].eta_min 0.01 -> 0.02",
    ),
    "the lower one of a cycle": (
        (lambda o: sched.CyclicLR(o, 0.1, 0.5, 4), 0.1),
        (lambda o: sched.CyclicLR(o, 0.2, 0.5, 4), 0.1),
        "lr 0.1 -> 0.2",
    ),
    "the upper one of a cycle": (
        (lambda o: sched.CyclicLR(o, 0.1, 0.5, 4), 0.1),
        (lambda o: sched.CyclicLR(o, 0.1, 0.6, 4), 0.1),
        "CyclicLR.max_lrs [0.5] -> [0.6]",
    ),
    "the first one of one cycle": (
        (lambda o: one_cycle(o, 0.1, 25, 1e4), 0.1),
        (lambda o: one_cycle(o, 0.1, 10, 4e3), 0.1),
        "lr 0.004 -> 0.01; min_lr 4e-07 -> 2.5e-06",
    ),
    "the highest one of one cycle": (
        (lambda o: one_cycle(o, 0.1, 25), 0.1),
        (lambda o: one_cycle(o, 0.2, 50), 0.1),
        "max_lr 0.1 -> 0.2",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("ranks", [(1, 1), (4, 4), (4, 2)], ids=["alone", "4 ranks", "4, then 2"])
def test_a_changed_rate_is_one_from_the_start(name: str, ranks: tuple[int, int]) -> None:
    """Rates that the user did not change stay: torch's are independent of the optimizer's. Those
    changed are scaled as any. The line names those that changed, and no other.
    """
    (before, lr_before), (after, lr_after), said = CHANGES[name]
    old, new, whole = (
        made(before, lr_before, ranks[0]),
        made(after, lr_after, ranks[1]),
        made(after, lr_after, ranks[1]),
    )
    assert "; ".join(resumed(old, new).changes) == said
    expected = train(*whole, 0, STEPS)[STOP:]
    assert train(*new, STOP, STEPS) == pytest.approx(expected, rel=1e-9)


def test_the_lowest_rate_of_a_plateau_is_scaled_where_it_changes() -> None:
    """A ReduceLROnPlateau's min_lr holds at its own value if the optimizer's rate changes."""

    def plateau(lr: float, min_lr: float) -> tuple[SGD, LearningRates]:
        return made(
            lambda o: sched.ReduceLROnPlateau(o, factor=0.1, min_lr=min_lr), lr, 4, interval="hand"
        )

    for lr, min_lr in ((0.1, 0.02), (0.2, 0.01), (0.2, 0.02)):
        new = plateau(lr, min_lr)
        resumed(plateau(0.1, 0.01), new)
        assert new[1].schedules[0].scheduler.min_lrs == pytest.approx([4 * min_lr])
