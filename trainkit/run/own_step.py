"""A Task's own optimizer_step: what a project of Lightning does around each update, as a warm-up by
hand.

    gradients of the step, on all ranks
    on_before_optimizer_step
    optimizer_step(epoch, batch_idx, optimizer, closure)
        optimizer.step(closure)     clip and update, once

There the closure computes the gradients. Here they are computed before, and it returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.api.view import RunView
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import TaskError
from trainkit.run.feature import Feature
from trainkit.run.run import Run

_BY_HAND = "For other updates set self.automatic_optimization = False."


class OwnStep(Feature):
    """A Task that defines optimizer_step."""

    name = "optimizer_step"
    not_by_hand = "Leave it out: Lightning does not call it there either"

    def __init__(self, run: Run) -> None:
        self._run = run

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
        run = self._run
        once = SteppedOnce(run, optimizer, partial(run.engine.step, clip_val, clip_algorithm))
        run.task.optimizer_step(
            run.current_epoch,
            run.state.batch_idx - 1,
            once,
            once.closure,
        )
        if once.updated is None:
            raise TaskError(
                f"{type(run.task).__name__}.optimizer_step returned without"
                f" optimizer.step(closure=optimizer_closure). {_BY_HAND}"
            )
        return once.updated


class SteppedOnce:
    """The optimizer that optimizer_step gets: `step` makes the update of all ranks; all else is to
    read or set, as torch's optimizer has it.

    Attributes:
        updated: whether the update was made; False if an overflow of fp16 held it back, None before
            `step`.
    """

    def __init__(self, run: Run, optimizer: Optimizer, update: Callable[[], bool]) -> None:
        self.optimizer = optimizer
        self.updated: bool | None = None
        self._run = run
        self._update = update
        self._was_called = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients and update the weights; return the closure's result."""
        if self.updated is not None:
            raise TaskError(f"{self._where} steps the optimizer twice. {_BY_HAND}")
        loss = None if closure is None else closure()
        self.updated = self._update()
        if self.updated:
            with allowed_read():  # a rate of the user's may be on the device
                self._run.rates.record_update(others_follow=True)
        return loss

    def closure(self) -> Tensor | None:
        """Return the loss of this rank's last batch; None if it has no batch in the step."""
        if self._was_called:
            raise TaskError(
                f"{self._where} calls the closure twice, and the gradients are computed once, before"
                f" it. {_BY_HAND}"
            )
        self._was_called = True
        return self._run.step.watch.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients are cleared before the next backward."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.optimizer, name)
        if callable(value) and not hasattr(Optimizer, name):
            raise TaskError(f"{self._where} calls the optimizer's {name}(). {_BY_HAND}")
        return value

    @property
    def _where(self) -> str:
        return f"{type(self._run.task).__name__}.optimizer_step"
