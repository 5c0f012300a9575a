"""Schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), of the package schedulefree: an
average of the weights takes the place of a schedule.

They train at one point and are evaluated at another: `train()` and `eval()` switch between the two,
which run/eval_weights.py calls, for any optimizer that has both.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch.optim import Optimizer

from trainkit.errors import ConfigError


def schedule_free(
    params: Any,
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Optimizer:
    """Return schedulefree's AdamWScheduleFree. Warm-up is the Trainer's (lr_warmup_steps), as the
    package's own: from 0, and a step weighs in the average by the square of the largest rate so far.

    Args:
        params: parameters or groups.
        lr: the rate; it does not decay.
        betas: the weight of the average in the point that is trained, and the decay of the second
            moment.
        eps: added to the root of the second moment.
        weight_decay: at the point that is trained.
        r: a step k weighs k^r in the average.
        weight_lr_power: and its rate to this power.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        package = importlib.import_module("schedulefree")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "optimizer=schedule_free needs schedulefree, which is not installed. Install: pip"
            " install 'trainkit[schedulefree]'"
        ) from error
    optimizer: Optimizer = package.AdamWScheduleFree(
        params, lr, tuple(betas), eps, weight_decay, r=r, weight_lr_power=weight_lr_power
    )
    return optimizer


def has_switch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has `train()` and `eval()`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of the package's."""
    return type(optimizer).__module__.partition(".")[0] == "schedulefree"
