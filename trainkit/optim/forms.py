"""Reads the forms that `configure_optimizers` may return (Lightning's) into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.errors import TaskError
from trainkit.extension import advice


def step_scheduler(scheduler: Any, metric: Any) -> None:
    """Step a scheduler, by the monitored value if it has one."""
    if metric is None:
        scheduler.step()
    else:
        scheduler.step(metric)


@dataclass(frozen=True)
class ScheduleConfig:
    """A scheduler and the times of its steps, as in Lightning's `lr_scheduler` dict;
    "hand": the user steps it.

    Attributes:
        reduce_on_plateau: whether one of another class steps by the monitored value.
        step: steps it; takes the scheduler and that value or None.
    """

    scheduler: Any
    interval: Literal["epoch", "step", "hand"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    step: Callable[[Any, Any], None] = step_scheduler

    @property
    def is_torchs(self) -> bool:
        """Whether it is one of torch's; another computes rates in the user's terms."""
        return isinstance(self.scheduler, LRScheduler)

    @property
    def reads_value(self) -> bool:
        """Whether it steps by the monitored value."""
        return self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)


def refuse_wrapped(optimizer: Optimizer) -> None:
    """Refuse an optimizer in another library's, which sums gradients or counts microbatches itself.

    Raises:
        TaskError: it is one.
    """
    if text := advice("an optimizer's package", type(optimizer).__module__.partition(".")[0]):
        raise TaskError(f"The optimizer is {text.removeprefix('. ')}")


def read_optimizers(
    returned: Any, automatic: bool = True, own_step: Callable[[Any, Any], None] | None = None
) -> tuple[list[Optimizer], list[ScheduleConfig]]:
    """Read the result of `configure_optimizers`.

    Args:
        own_step: lr_scheduler_step of a Task that defines it, which may step any scheduler.

    Raises:
        TaskError: it is none of the known forms, or an optimizer that needs a closure, or another library's.
    """
    if not automatic:
        own_step = None
    optimizers, schedules = _read_forms(returned)
    schedules = [
        config if config.interval == "hand" else _with_step(config, own_step, automatic)
        for config in schedules
    ]
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


def _with_step(
    config: ScheduleConfig, own_step: Callable[[Any, Any], None] | None, automatic: bool
) -> ScheduleConfig:
    """Return a schedule with what steps it.

    Raises:
        TaskError: nothing can, or the scheduler lacks what a run needs.
    """
    kind = type(config.scheduler).__name__
    if own_step is not None:
        config = replace(config, step=own_step)
    elif not config.is_torchs:
        raise TaskError(
            f"lr_scheduler is of type {kind}; it must be a torch scheduler, or a Task must define"
            " lr_scheduler_step(self, scheduler, metric), which steps it, as"
            " scheduler.step(self.current_epoch + 1), under automatic optimization. Or keep it to"
            " yourself, and call its step(...): in on_train_epoch_end or on_train_batch_end, in"
            " training_step of a Task that optimizes by hand, or in the loop of a Loop."
        )
    elif not automatic:
        config = replace(config, reduce_on_plateau=False)  # the Task gives the value
    for name in ("optimizer", "state_dict", "load_state_dict"):
        if not hasattr(config.scheduler, name):
            raise TaskError(
                f"lr_scheduler is of type {kind}, which has no {name}. A scheduler needs"
                " `optimizer`, whose rates it sets, and state_dict() and load_state_dict(state), by"
                " which a run resumes."
            )
    if not config.reads_value:
        return replace(config, monitor=None)  # it need not wait for one
    if config.monitor is None:
        raise TaskError(f"{kind} needs 'monitor': the name of the logged value to monitor.")
    if config.interval != "epoch":
        raise TaskError(
            f"{kind} has interval 'step'; it must be 'epoch': it monitors an epoch's value."
        )
    return config


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
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            optimizers, given = returned
            schedulers = given if isinstance(given, (list, tuple)) else [given]
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
        config = ScheduleConfig(**item)
    else:
        config = ScheduleConfig(item, monitor=monitor)
    if config.interval not in ("epoch", "step"):
        raise TaskError(
            f"lr_scheduler interval is '{config.interval}'; it must be 'epoch' or 'step'."
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise TaskError(
            f"lr_scheduler frequency is {config.frequency}; it must be a whole number, 1 or more."
        )
    return config
