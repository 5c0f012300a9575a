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
from trainkit.device.shards import is_spread
from trainkit.errors import ConfigError
from trainkit.optim.forms import ScheduleConfig
from trainkit.run.gradients import parameters_of

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

    An engine that splits weights puts others in their place, which the optimizers then get.
    """

    def __init__(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], schedulers: list[Any]
    ) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [
            [[names.get(parameter) for parameter in group["params"]] for group in each.param_groups]
            for each in optimizers
        ]
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

    def __call__(self, module: nn.Module) -> Any:
        """Return them, with the settings and the state that they had.

        Raises:
            ConfigError: each rank holds a part of the weights, and a state is of whole ones.
        """
        present = dict(module.named_parameters())
        all_names = zip(self._optimizers, self._groups, self._names, strict=True)
        for optimizer, settings, names_of_groups in all_names:
            optimizer.state.clear()
            groups = zip(optimizer.param_groups, settings, names_of_groups, strict=True)
            for group, values, names in groups:
                group.update(deepcopy(values))
                given = zip(names, group["params"], strict=True)
                group["params"][:] = [present.get(name or "", own) for name, own in given]
        for optimizer, state in zip(self._optimizers, self._loaded, strict=True):
            if state and any(is_spread(parameter) for parameter in parameters_of(optimizer)):
                raise ConfigError(
                    f"Loop: {type(optimizer).__name__} has a state already (it was loaded, or has"
                    " made steps), and each rank holds a part of the weights. Give a new optimizer;"
                    " to continue a run of trainkit: ckpt_path=..."
                )
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

    def setup(self, stage: str) -> None:
        stages = self.trainer.engine.ranks.pipeline_size
        if stages > 1:
            raise ConfigError(
                f"Loop: engine.pipeline is {stages}, but the body of your own loop cannot be cut"
                " into stages. Move it into a Task's training_step, or leave engine.pipeline out."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.turns.pass_batch(Batch("train", batch, self.current_epoch, 0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.turns.after_batch()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.turns.pass_batch(Batch("val", batch, self.current_epoch, dataloader_idx))

    def configure_optimizers(self) -> Any:
        return self.configured(self.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loop"] = self.turns.state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.turns.state.update(checkpoint.get("loop", {}))


def module_of(model: Any) -> nn.Module:
    """Return the module, or one of a dict or list of modules."""
    if isinstance(model, Mapping):
        return nn.ModuleDict(model)
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def task_of(module: nn.Module, configured: GivenOptimizers, turns: LoopTurns) -> LoopTask:
    """Return the Task of a module."""
    named = type(type(module).__name__, (LoopTask,), {})  # the run's folder is named after it
    task: LoopTask = named(module, configured, turns)
    return task
