"""A Task's own optimizer_step: what a project of Lightning does around each update, as a warm-up by
hand.

    gradients of the step, on all ranks
    on_before_optimizer_step
    optimizer_step(epoch, batch_idx, optimizer, closure)
        optimizer.step(closure)     clip and update, once

There the closure computes the gradients. Here they are computed before, and it returns the loss: an
update that needs others (new weights, a second closure) is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import TaskError
from trainkit.extensions.own_update import own_clip
from trainkit.extensions.own_update.own_clip import logging_step
from trainkit.run.feature import Feature
from trainkit.run.run import Run
from trainkit.run.setup import Stage

_BY_HAND = "For other updates set self.automatic_optimization = False."


def of_stage(stage: Stage) -> OwnStep | None:
    """Return the feature of a Task that defines it; None if it does not."""
    if not has_step(stage.task, Task, "optimizer_step"):
        return None
    clip = own_clip.of_stage(stage)
    return OwnStep(stage.run, stage.engine.step if clip is None else clip.update)


class OwnStep(Feature):
    """A Task that defines optimizer_step.

    Args:
        update: clips and updates; returns whether no overflow held the update back.
    """

    name = "optimizer_step"
    not_by_hand = "Leave it out: Lightning does not call it there either"

    def __init__(self, run: Run, update: Callable[[float | None, str], bool]) -> None:
        self._run = run
        self._within = update
        self._last: Callable[[], Tensor | None] = lambda: None  # the loss of the step before

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Let the Task make each update.

        Raises:
            TaskError: it has several optimizers.
        """
        if len(optimizers) > 1:
            raise TaskError(
                f"{type(run.task).__name__}.optimizer_step is for one optimizer, and"
                f" configure_optimizers returns {len(optimizers)}. {_BY_HAND}"
            )
        return {"update": partial(self._update, optimizers[0])}

    def _update(self, optimizer: Optimizer, clip_val: float | None, clip_algorithm: str) -> bool:
        """Update as Engine.step does, within the Task's method."""
        run, state = self._run, self._run.state
        accumulate = run.batch_plan.at(run.current_epoch).accumulate
        loss = run.step.watch.last
        own = loss if loss is not self._last() else None  # this rank may have no batch in the step
        if loss is not None:
            self._last = weakref.ref(loss)
        once = SteppedOnce(
            run,
            optimizer,
            partial(self._within, clip_val, clip_algorithm),
            None if own is None else own.detach() / accumulate,
        )
        # the same on ranks whose last step is shorter
        last = (state.step_in_epoch + 1) * accumulate - 1
        batch_idx = state.batch_idx - 1 if run.world_size == 1 else last
        state.half_updated = False
        with logging_step(run):
            run.task.optimizer_step(run.current_epoch, batch_idx, once, once.closure)
        if once.updated is None:
            raise TaskError(
                f"{type(run.task).__name__}.optimizer_step returned without"
                f" optimizer.step(closure=optimizer_closure). {_BY_HAND}"
            )
        return once.updated


class SteppedOnce:
    """The optimizer that optimizer_step gets: `step` makes the update of all ranks; all else is
    that of torch's optimizer, to read.

    Args:
        loss: what the closure returns.

    Attributes:
        updated: whether the update was made; False if an overflow of fp16 held it back, None before
            `step`.
    """

    def __init__(
        self, run: Run, optimizer: Optimizer, update: Callable[[], bool], loss: Tensor | None
    ) -> None:
        self.optimizer = optimizer
        self.updated: bool | None = None
        self._run = run
        self._update = update
        self._loss = loss
        self._was_called = False
        self._version = _version_of(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients and update the weights; return the closure's result."""
        if self.updated is not None:
            raise TaskError(f"{self._where} steps the optimizer twice. {_BY_HAND}")
        loss = None if closure is None else closure()
        if _version_of(self.optimizer) != self._version:
            raise TaskError(
                f"{self._where} changes weights before optimizer.step(), and the gradients are"
                f" those of the weights before it. {_BY_HAND}"
            )
        self._run.state.half_updated = True
        self.updated = self._update()
        if self.updated:
            with allowed_read():  # a rate of the user's may be on the device
                self._run.rates.record_update(others_follow=True)
        return loss

    def closure(self) -> Tensor | None:
        """Return the loss of this rank's last batch by the number of accumulated ones; None if it
        has no batch in the step.
        """
        if self._was_called:
            raise TaskError(
                f"{self._where} calls the closure twice, and the gradients are computed once,"
                f" before it. {_BY_HAND}"
            )
        self._was_called = True
        return self._loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are cleared before the next backward.

        Raises:
            TaskError: it would leave the update without gradients.
        """
        if self._was_called and self.updated is None:
            raise TaskError(f"{self._where} drops the gradients before the update. {_BY_HAND}")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.optimizer, name)
        if callable(value) and not hasattr(Optimizer, name):
            raise TaskError(f"{self._where} calls the optimizer's {name}(). {_BY_HAND}")
        return value

    @property
    def _where(self) -> str:
        return f"{type(self._run.task).__name__}.optimizer_step"


def _version_of(optimizer: Optimizer) -> int:
    """Return a number that changes with each change of a weight in place."""
    groups: Iterable[Mapping[str, Any]] = optimizer.param_groups
    return sum(parameter._version for group in groups for parameter in group["params"])
