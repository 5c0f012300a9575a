"""Reads the forms that `configure_optimizers` may return (Lightning's) into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.errors import TaskError
from trainkit.extension import advice


@dataclass(frozen=True)
class ScheduleConfig:
    """A scheduler and the times of its steps, as in Lightning's `lr_scheduler` dict;
    "hand": the user steps it.
    """

    scheduler: LRScheduler
    interval: Literal["epoch", "step", "hand"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None


def refuse_wrapped(optimizer: Optimizer) -> None:
    """Refuse an optimizer in another library's, which sums gradients or counts microbatches itself.

    Raises:
        TaskError: it is one.
    """
    if text := advice("an optimizer's package", type(optimizer).__module__.partition(".")[0]):
        raise TaskError(f"The optimizer is {text.removeprefix('. ')}")


def read_optimizers(
    returned: Any, automatic: bool = True
) -> tuple[list[Optimizer], list[ScheduleConfig]]:
    """Read the result of `configure_optimizers`.

    Raises:
        TaskError: it is none of the known forms, or an optimizer that needs a closure, or another library's.
    """
    optimizers, schedules = _read_forms(returned)
    for optimizer in optimizers:
        refuse_wrapped(optimizer)
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise TaskError(
                f"configure_optimizers returned a {type(optimizer).__name__}, whose parameter groups"
                " have no 'lr', which the Trainer scales, schedules and logs. If it computes its"
                " own, give each group one that it does not read: group['lr'] = 1.0."
            )
        if isinstance(optimizer, LBFGS) and automatic:
            raise TaskError(
                "configure_optimizers returned LBFGS, which evaluates the loss several times a"
                " step. Set self.automatic_optimization = False, and call"
                " self.optimizers().step(closure) in training_step."
            )
    for config in schedules:
        if not any(config.scheduler.optimizer is optimizer for optimizer in optimizers):
            raise TaskError(
                f"configure_optimizers returned a {type(config.scheduler).__name__} for an"
                " optimizer that it did not return: it would change no rate. Make it for a"
                " returned one."
            )
    return optimizers, schedules


def _read_forms(returned: Any) -> tuple[list[Optimizer], list[ScheduleConfig]]:
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _read_dicts([returned])
    if isinstance(returned, (list, tuple)) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
        if all(isinstance(item, Mapping) for item in returned):
            return _read_dicts(returned)
        if len(returned) == 2 and all(isinstance(item, (list, tuple)) for item in returned):
            optimizers, schedulers = returned
            if all(isinstance(opt, Optimizer) for opt in optimizers):
                return list(optimizers), [_read_schedule(item) for item in schedulers]
    if returned is None:
        raise TaskError(
            "configure_optimizers returned None: nothing would be trained. Return a torch"
            " optimizer; to evaluate a model, call Trainer.validate."
        )
    raise TaskError(
        f"configure_optimizers returned {type(returned).__name__}; it must return a torch"
        " optimizer, a list of them, ([optimizers], [schedulers]), or {'optimizer': ...,"
        " 'lr_scheduler': ...}."
    )


def _read_dicts(dicts: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[ScheduleConfig]]:
    optimizers = []
    schedules = []
    for item in dicts:
        schedule = item.get("lr_scheduler")
        known = {"optimizer", "lr_scheduler", *(("monitor",) if schedule is not None else ())}
        if set(item) - known or not isinstance(item.get("optimizer"), Optimizer):
            raise TaskError(
                f"configure_optimizers returned a dict with the keys {sorted(item)}; it must have"
                " 'optimizer' (a torch optimizer) and may have 'lr_scheduler' and its 'monitor'."
            )
        optimizers.append(item["optimizer"])
        if schedule is not None:
            schedules.append(_read_schedule(schedule, item.get("monitor")))
    return optimizers, schedules


def _read_schedule(item: Any, monitor: str | None = None) -> ScheduleConfig:
    if isinstance(item, ScheduleConfig):
        return item
    if isinstance(item, Mapping):
        known = {
            "scheduler",
            "interval",
            "frequency",
            "monitor",
            "strict",
            "name",
            "reduce_on_plateau",
        }
        if set(item) - known or "scheduler" not in item:
            raise TaskError(
                f"lr_scheduler has the keys {sorted(item)}; it must have 'scheduler', and may have"
                f" {sorted(known)}."
            )
        config = ScheduleConfig(**{k: v for k, v in item.items() if k != "reduce_on_plateau"})
    else:
        config = ScheduleConfig(item, monitor=monitor)
    if not isinstance(config.scheduler, LRScheduler):
        raise TaskError(
            f"lr_scheduler is of type {type(config.scheduler).__name__}; it must be a torch"
            " scheduler. Step another yourself: make it an attribute of the Task, and call its"
            " step(...) in on_train_epoch_end or on_train_batch_end. Its rates hold as it sets them;"
            " its state, if it has one, is for on_save_checkpoint."
        )
    if config.interval not in ("epoch", "step"):
        raise TaskError(
            f"lr_scheduler interval is '{config.interval}'; it must be 'epoch' or 'step'."
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise TaskError(
            f"lr_scheduler frequency is {config.frequency}; it must be a whole number, 1 or more."
        )
    if not isinstance(config.scheduler, ReduceLROnPlateau):
        return replace(config, monitor=None)  # it reads no value, and need not wait for one
    if config.monitor is None:
        raise TaskError(
            "ReduceLROnPlateau needs 'monitor': the name of the logged value to monitor."
        )
    if config.interval != "epoch":
        raise TaskError(
            "ReduceLROnPlateau has interval 'step'; it must be 'epoch': it monitors an epoch's"
            " value."
        )
    return config
