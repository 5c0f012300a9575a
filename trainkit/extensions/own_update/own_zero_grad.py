"""A Task's own optimizer_zero_grad: before the first backward of a step, after
on_before_zero_grad.

Gradients are then set to None, as they are without it: what a method leaves would be summed over
the ranks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.errors import TaskError
from trainkit.run.feature import Feature
from trainkit.run.run import Run
from trainkit.run.setup import Stage


def of_stage(stage: Stage) -> OwnZeroGrad | None:
    """Return the feature of a Task that defines it; None if it does not."""
    has = has_step(stage.task, Task, "optimizer_zero_grad")
    return OwnZeroGrad(stage.run) if has else None


class OwnZeroGrad(Feature):
    """A Task that defines optimizer_zero_grad."""

    name = "optimizer_zero_grad"
    not_by_hand = "Leave it out: Lightning does not call it there either"

    def __init__(self, run: Run) -> None:
        self._run = run

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Let the Task drop the gradients of the step before."""
        return {"clears_late": True, "own_clear": self._clear}

    def _clear(self) -> None:
        run, task = self._run, self._run.task
        where = f"{type(task).__name__}.optimizer_zero_grad"
        for optimizer in run.optimizers:
            given = Cleared(optimizer, where)
            task.optimizer_zero_grad(run.current_epoch, run.state.batch_idx, given)
            if not given.was_cleared and _has_gradients(optimizer):
                raise TaskError(
                    f"{where} leaves the gradients of the step before, which would be summed over"
                    " the ranks again. Call optimizer.zero_grad(). To add up several batches:"
                    " trainer.accumulate_grad_batches=N."
                )


class Cleared:
    """The optimizer that optimizer_zero_grad gets: all but `zero_grad` is that of torch's
    optimizer, to read.

    Attributes:
        was_cleared: whether `zero_grad` was called.
    """

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer = optimizer
        self.was_cleared = False
        self._where = where

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Raises:
            TaskError: they would stay, as zeros.
        """
        if not set_to_none:
            raise TaskError(
                f"{self._where} calls zero_grad(set_to_none=False), and gradients are set to None"
                " here: a weight without one is not updated. Leave set_to_none out."
            )
        self.was_cleared = True

    def __getattr__(self, name: str) -> Any:
        if name == "step":
            raise TaskError(f"{self._where} steps the optimizer. Leave that to the Trainer.")
        return getattr(self.optimizer, name)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
