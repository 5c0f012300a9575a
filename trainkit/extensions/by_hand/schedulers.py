"""The schedulers that a user's own loop steps."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainkit.api.view import RunView
from trainkit.optim.scheduler_state import with_inner

# The attributes that hold a scheduler's length.
_LENGTHS = ("total_steps", "T_max", "total_iters", "num_training_steps")


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


def _lengths_of(scheduler: Any) -> list[int]:
    """Return the steps that a scheduler, or a function of transformers in it, is made for."""
    parts = [vars(scheduler), *(getattr(f, "keywords", {}) for f in _functions_of(scheduler))]
    return [part[name] for part in parts for name in _LENGTHS if isinstance(part.get(name), int)]


def _functions_of(scheduler: Any) -> list[Any]:
    return scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else []


def report_longer(schedulers: Iterable[LRScheduler], run: RunView) -> None:
    """Say which schedulers are longer than a run on several ranks: a script that splits its data
    counts the batches of one rank, and here a loader has those of all.
    """
    steps = run.total_steps
    if run.world_size == 1 or steps is None:
        return
    for scheduler in with_inner(schedulers):
        for length in _lengths_of(scheduler):
            if length > steps:
                run.say(
                    f"{type(scheduler).__name__} is made for {length} steps, and the run has"
                    f" {steps} on {run.world_size} ranks: len(loader) counts the batches of all"
                    " ranks. Divide it by trainkit.world_size()."
                )
