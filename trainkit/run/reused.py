"""Reused: what a process of an elastic run makes once, and uses in each attempt."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainkit.api.task import Task
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig
from trainkit.optim.optimizer_state import load_state

Made = tuple[list[Optimizer], list[ScheduleConfig]]


class ReusedParts:
    """The compiled modules and the optimizers of a Task.

    Other ranks wait while a rank makes them. All ranks of an attempt have the state of rank 0, so
    only the settings that they were made with count, and these are kept too.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._has_entered = False
        self._made: Made | None = None
        self._plan: BatchPlan | None = None
        self._parameters: list[list[int]] = []

    def enter_once(self, context: contextlib.AbstractContextManager[None]) -> None:
        """Enter the context of compiled modules until `close`, unless an earlier attempt has."""
        if not self._has_entered:
            self._stack.enter_context(context)
            self._has_entered = True

    def optimizers(self, task: Task, plan: BatchPlan, make: Callable[[], Made]) -> Made:
        """Return what `make` returned, as it was then.

        It is made again if the task has other parameters now, an optimizer has other groups (as of
        a fine-tuning that adds some), a scheduler is not torch's, whose state need not be all that
        it has, or the plan of batch and rate is another.
        """
        if (
            self._made is None
            or not all(config.is_torchs for config in self._made[1])
            or self._plan != plan
            or self._parameters != _parameters(task, self._made[0])
        ):
            self._made, self._plan = make(), plan
            self._parameters = _parameters(task, self._made[0])
            self._optimizers = [
                copy.deepcopy(optimizer.state_dict()) for optimizer in self._made[0]
            ]
            self._schedulers = [
                copy.deepcopy(_settings(config.scheduler)) for config in self._made[1]
            ]
        else:
            for optimizer, state in zip(self._made[0], self._optimizers, strict=True):
                load_state(optimizer, copy.deepcopy(state))  # it may take over the tensors
            for config, settings in zip(self._made[1], self._schedulers, strict=True):
                config.scheduler.load_state_dict(copy.deepcopy(settings))
        return self._made

    def close(self) -> None:
        """Release all."""
        self._stack.close()
        self._made = None


def _parameters(task: nn.Module, optimizers: list[Optimizer]) -> list[list[int]]:
    of_optimizers = [
        [id(p) for p in group["params"]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return [[id(parameter) for parameter in task.parameters()], *of_optimizers]


def _settings(scheduler: Any) -> dict[str, Any]:
    settings: dict[str, Any] = scheduler.state_dict()
    return settings
