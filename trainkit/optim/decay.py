"""Learning-rate schedules over a whole run, counted in optimizer steps. Warm-up and scaling are the
Trainer's.

Each takes the optimizer and the number of steps of the run (`trainer.estimated_stepping_batches`)
and returns a torch scheduler that is stepped once per step.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR

from trainkit.arguments import Fraction, PositiveFloat
from trainkit.errors import ConfigError


def cosine(optimizer: Optimizer, total_steps: int, end: Fraction = 0.0) -> LambdaLR:
    """Decay along half a cosine from 1 to `end` times the rate (Loshchilov and Hutter 2017, without
    restarts).

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        end: the rate at the last step, as a share of the first.
    """
    return LambdaLR(
        optimizer,
        lambda t: end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(t / total_steps, 1.0))),
    )


def constant(optimizer: Optimizer, total_steps: int) -> ConstantLR:
    """Leave the rate as it is, as optimizers that average weights want it (optimizer=schedule_free).

    Args:
        optimizer: its rates stay.
        total_steps: has no effect.
    """
    return ConstantLR(optimizer, factor=1.0, total_iters=0)


def polynomial(
    optimizer: Optimizer, total_steps: int, power: PositiveFloat = 2.0, end: Fraction = 0.0
) -> LambdaLR:
    """Decay as (1 - t/T)^power from 1 to `end` times the rate; power 1 is a straight line.

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        power: 2 in the record runs of ResNet-50 with LARS (You et al. 2017).
        end: the rate at the last step, as a share of the first.
    """
    return LambdaLR(optimizer, lambda t: end + (1 - end) * (1 - min(t / total_steps, 1.0)) ** power)


def step(
    optimizer: Optimizer,
    total_steps: int,
    milestones: list[float] | None = None,
    gamma: Fraction = 0.1,
) -> LambdaLR:
    """Multiply the rate by `gamma` at each milestone.

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        milestones: shares of the run, rising, each between 0 and 1. Default: 1/3, 2/3 and 8/9, that
            is epochs 30, 60 and 80 of 90 (Goyal et al. 2017, section 5.1).
        gamma: the factor.

    Raises:
        ConfigError: the milestones do not rise between 0 and 1.
    """
    shares = [1 / 3, 2 / 3, 8 / 9] if milestones is None else list(milestones)
    if sorted(shares) != shares or not all(0 < share < 1 for share in shares):
        raise ConfigError(
            f"lr.milestones is {shares}; it must be shares of the run, rising, each between 0"
            " and 1."
        )
    return LambdaLR(optimizer, lambda t: gamma ** bisect_right(shares, t / total_steps))
