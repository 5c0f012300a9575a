"""Learning-rate schedules over a whole run, counted in optimizer steps. Warm-up and scaling are the
Trainer's.

Each takes the optimizer and the number of steps of the run (`trainer.estimated_stepping_batches`)
and returns a torch scheduler that is stepped once per step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR

from trainkit.arguments import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from trainkit.errors import ConfigError


def cosine(
    optimizer: Optimizer, total_steps: int, end: Fraction = 0.0, hold_steps: NonNegativeInt = 0
) -> LambdaLR:
    """Decay along half a cosine from 1 to `end` times the rate (Loshchilov and Hutter 2017, without
    restarts).

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        end: the rate at the last step, as a share of the first.
        hold_steps: steps before the decay. As many as warm-up has, and the whole cosine follows
            it; with 0 warm-up multiplies the first part of the cosine.

    Raises:
        ConfigError: the run has no step left for the decay.
    """
    share = _share_of_decay(total_steps, hold_steps)
    return LambdaLR(optimizer, lambda t: end + (1 - end) * 0.5 * (1 + math.cos(math.pi * share(t))))


def _share_of_decay(total_steps: int, hold_steps: int) -> Callable[[int], float]:
    """Return the function from a step to the share of the decay that is done by then."""
    if 0 < total_steps <= hold_steps:
        raise ConfigError(
            f"lr.hold_steps is {hold_steps}, and the run has {total_steps} steps: none is left for"
            f" the decay. It must be below {total_steps}."
        )
    steps = total_steps - hold_steps
    return lambda t: min(max(t - hold_steps, 0) / steps, 1.0)


def constant(optimizer: Optimizer, total_steps: int) -> ConstantLR:
    """Leave the rate as it is, as optimizers that average weights want it (optimizer=schedule_free).

    Args:
        optimizer: its rates stay.
        total_steps: has no effect.
    """
    return ConstantLR(optimizer, factor=1.0, total_iters=0)


def polynomial(
    optimizer: Optimizer,
    total_steps: int,
    power: PositiveFloat = 2.0,
    end: Fraction = 0.0,
    hold_steps: NonNegativeInt = 0,
) -> LambdaLR:
    """Decay as (1 - t/T)^power from 1 to `end` times the rate; power 1 is a straight line.

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        power: 2 in the record runs of ResNet-50 with LARS (You et al. 2017).
        end: the rate at the last step, as a share of the first.
        hold_steps: steps before the decay, as in `cosine`.

    Raises:
        ConfigError: the run has no step left for the decay.
    """
    share = _share_of_decay(total_steps, hold_steps)
    return LambdaLR(optimizer, lambda t: end + (1 - end) * (1 - share(t)) ** power)


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


# what is left of the rate after a share of the decay
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}


def wsd(
    optimizer: Optimizer,
    total_steps: int,
    decay: Fraction | None = None,
    decay_steps: PositiveInt | None = None,
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt",
    end: Fraction = 0.0,
) -> LambdaLR:
    """Hold the rate, and let it fall in the last part of the run to `end` times the rate: warm-up,
    stable, decay (Hu et al. 2024, MiniCPM, section 4.2); warm-up is the Trainer's.

    Up to the decay the rate does not depend on the run's length. A run that is resumed from there
    with more steps is the same as one that had them from the start.

    Args:
        optimizer: its rates decay.
        total_steps: steps of the run.
        decay: the last part, as a share of the run, a step at least; 0 for none. 0.1 if neither
            it nor `decay_steps` is given.
        decay_steps: the last part, in steps.
        decay_type: as transformers names them; 1-sqrt was the best of Haegele et al. 2024,
            section 3.
        end: the rate after the last step, as a share of the first.

    Raises:
        ConfigError: both are given, or the decay is longer than the run.
    """
    if decay is not None and decay_steps is not None:
        raise ConfigError(
            f"lr.decay is {decay} and lr.decay_steps is {decay_steps}; give one of them: a share of"
            " the run, or steps."
        )
    if decay_steps is None:
        share = 0.1 if decay is None else decay
        decay_steps = max(round(total_steps * share), math.ceil(share))
    if decay_steps > total_steps:
        raise ConfigError(
            f"lr.decay_steps is {decay_steps}, and the run has {total_steps} steps; it must be"
            f" {total_steps} or less. Or give a share of the run: lr.decay=0.1"
        )
    first = total_steps - decay_steps
    left = _SHAPES[decay_type]

    def factor(step: int) -> float:
        if step <= first or decay_steps == 0:
            return 1.0
        return end + (1 - end) * left(min((step - first) / decay_steps, 1.0))

    return LambdaLR(optimizer, factor)
