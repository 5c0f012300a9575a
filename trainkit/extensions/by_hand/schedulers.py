"""The schedulers that a user's own loop steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.optim.scheduler_state import with_inner


def schedulers_of(optimizers: Sequence[Optimizer], without: Sequence[Any]) -> list[LRScheduler]:
    """Return the schedulers that were made for these optimizers: the user's loop steps them.

    An optimizer does not know its schedulers; the garbage collector knows all objects.

    Args:
        optimizers: of the loop.
        without: schedulers that the fit steps.
    """
    every = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    own = [each for each in every if any(each.optimizer is optimizer for optimizer in optimizers)]
    fits = {id(each) for each in with_inner(without)}
    inner = {id(part) for each in own for part in with_inner([each]) if part is not each}
    return [each for each in own if id(each) not in fits | inner]
