"""LearningRateMonitor: logs every parameter group's learning rate, under Lightning's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from torch.optim import Optimizer

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import ConfigError
from trainkit.extensions.insight.log_steps import is_log_step, write
from trainkit.optim.forms import ScheduleConfig


@checked
class LearningRateMonitor(Callback):
    """Logs the rates that a step's update used: warm-up, factor and schedules included. Other
    callbacks find them in `trainer.callback_metrics`.

    The names are `lr-SGD`, `lr-SGD-1` for a second optimizer of the class, `lr-SGD/pg1`,
    `lr-SGD/pg2` if there are several groups (or `lr-SGD/<name>` for a group with a "name"), and
    `<name>` if the `lr_scheduler` dict has a "name".

    Args:
        logging_interval: "step" logs every log_every_n_steps, "epoch" those of each epoch's first
            step; None logs by steps if the rates change within an epoch (warm-up, a scheduler with
            interval "step"), otherwise by epochs.
        log_momentum: log `<name>-momentum` too: the momentum, or the first of the betas.
        log_weight_decay: log `<name>-weight_decay` too.
    """

    config_key = "callbacks.learning_rate"

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._by_steps = False
        self._used: dict[str, float] = {}

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Choose the logging interval; fail now if two groups share a name."""
        run = trainer
        contract = trainer.batch_plan
        moves = contract.warmup_steps > 0 or any(
            config.interval == "step" for config in run.rates.schedules
        )
        self._by_steps = self.logging_interval == "step" or (
            self.logging_interval is None and moves
        )
        names_of(run.optimizers, run.rates.schedules)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Read the rates of a batch that may make no update: gradients accumulated by hand."""
        if self._by_steps and not task.automatic_optimization and is_log_step(trainer, ahead=1):
            self._used = self.read(trainer)

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Optimizer) -> None:
        """Read the rates, which the schedulers move right after the update."""
        if self._by_steps and is_log_step(trainer, ahead=1):
            self._used = self.read(trainer)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if self._by_steps and is_log_step(trainer):
            _log(trainer, self._used)

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        # of an epoch that a run resumes the rates were logged
        is_new = trainer.state.step_in_epoch == 0
        if not self._by_steps and is_new:
            _log(trainer, self.read(trainer))

    def read(self, trainer: RunView) -> dict[str, float]:
        """Return the values by name. Waits for the device if an
        optimizer keeps its rate on it (capturable).
        """
        run = trainer
        values = {}
        names = names_of(run.optimizers, run.rates.schedules)
        for optimizer, of_groups in zip(run.optimizers, names, strict=True):
            for group, name in zip(optimizer.param_groups, of_groups, strict=True):
                with allowed_read():
                    values[name] = float(group["lr"])
                    if self.log_momentum:
                        values[f"{name}-momentum"] = _momentum(group)
                    if self.log_weight_decay:
                        values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values


def _log(trainer: RunView, values: dict[str, float]) -> None:
    """Hand them to the loggers, and to other callbacks on every rank, as in Lightning."""
    trainer.callback_metrics.put(values, trainer.global_step)
    if trainer.is_global_zero:
        write(trainer, values)


def names_of(
    optimizers: Sequence[Optimizer], schedules: Sequence[ScheduleConfig]
) -> list[list[str]]:
    """Return the name of each group of each optimizer. Those with a scheduler are counted first, as
    in Lightning.

    Raises:
        ConfigError: two groups have the same name.
    """
    given = {id(config.scheduler.optimizer): config.name for config in schedules if config.name}
    scheduled = [config.scheduler.optimizer for config in schedules]
    seen: Counter[str] = Counter()
    by_optimizer: dict[int, list[str]] = {}
    for optimizer in dict.fromkeys([*scheduled, *optimizers]):
        name = given.get(id(optimizer)) or f"lr-{type(optimizer).__name__}"
        seen[name] += 1
        name += f"-{seen[name] - 1}" * (seen[name] > 1)
        groups = optimizer.param_groups
        own = [str(group.get("name") or f"pg{i}") for i, group in enumerate(groups, 1)]
        by_optimizer[id(optimizer)] = (
            [f"{name}/{part}" for part in own] if len(groups) > 1 or "name" in groups[0] else [name]
        )
    names = [by_optimizer[id(optimizer)] for optimizer in optimizers]
    counts = Counter(name for of_groups in names for name in of_groups)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"{LearningRateMonitor.config_key}: two parameter groups are named '{twice[0]}'. "
            'Give each a "name" of its own, or remove both.'
        )
    return names


def _momentum(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0] if betas else group.get("momentum", 0.0))
