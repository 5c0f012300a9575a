"""LoopTask: the Task of a loop written by hand;
it passes its batches to the loop, and takes the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from trainkit.api.task import Task
from trainkit.optim.forms import ScheduleConfig

Kind = Literal["train", "val"]


class Batch(NamedTuple):
    """A batch that the fit passes to the user's loop."""

    kind: Kind
    data: Any
    epoch: int
    loader: int


class GivenOptimizers:
    """The user's optimizers and schedulers as they were given:
    an elastic run begins with them again when its ranks change.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], schedulers: list[Any]) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._groups = [
            [_settings_of(group) for group in optimizer.param_groups] for optimizer in optimizers
        ]
        self._states = [deepcopy(scheduler_of(scheduler).state_dict()) for scheduler in schedulers]
        # that of optimizers which a script has loaded, or used
        self._loaded = [
            deepcopy(optimizer.state_dict()["state"]) if optimizer.state else {}
            for optimizer in optimizers
        ]

    def __call__(self) -> Any:
        """Return them, with the settings and the state that they had."""
        for optimizer, settings in zip(self._optimizers, self._groups, strict=True):
            optimizer.state.clear()
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(deepcopy(values))
        for optimizer, state in zip(self._optimizers, self._loaded, strict=True):
            if state:
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": deepcopy(state), "param_groups": groups})
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler_of(scheduler).load_state_dict(deepcopy(state))
        return (self._optimizers, self._schedulers) if self._schedulers else self._optimizers


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return deepcopy({name: value for name, value in group.items() if name != "params"})


def scheduler_of(scheduler: Any) -> Any:
    """Return the scheduler of a form in which it may be given."""
    if isinstance(scheduler, ScheduleConfig):
        return scheduler.scheduler
    return scheduler["scheduler"] if isinstance(scheduler, Mapping) else scheduler


class LoopTurns(NamedTuple):
    """What a LoopTask calls.

    Attributes:
        pass_batch: give the loop a batch; returns once the loop has run backward, or asks for the
            next batch, with the loss.
        after_batch: let the loop's body continue.
        state: the user's own values.
    """

    pass_batch: Callable[[Batch], Any]
    after_batch: Callable[[], None]
    state: dict[str, Any]


class LoopTask(Task):
    """See the module."""

    configured: GivenOptimizers
    turns: LoopTurns

    def __init__(self, model: nn.Module, configured: GivenOptimizers, turns: LoopTurns) -> None:
        super().__init__()
        self.model = model
        self.__dict__.update(configured=configured, turns=turns)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.turns.pass_batch(Batch("train", batch, self.current_epoch, 0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.turns.after_batch()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.turns.pass_batch(Batch("val", batch, self.current_epoch, dataloader_idx))

    def configure_optimizers(self) -> Any:
        return self.configured()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loop"] = self.turns.state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.turns.state.update(checkpoint.get("loop", {}))


def task_of(model: Any, configured: GivenOptimizers, turns: LoopTurns) -> LoopTask:
    """Return the Task of a module, or of a dict or list of modules."""
    if isinstance(model, Mapping):
        module: nn.Module = nn.ModuleDict(model)
    else:
        module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    named = type(type(module).__name__, (LoopTask,), {})  # the run's folder is named after it
    task: LoopTask = named(module, configured, turns)
    return task
