"""A Task's own configure_gradient_clipping: how the gradients of a step, summed over ranks, are
clipped before the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainkit.api.step_call import has_step
from trainkit.api.task import LogTarget, Task
from trainkit.api.view import RunView
from trainkit.optim.clipping import clip
from trainkit.run.feature import Feature
from trainkit.run.run import Run
from trainkit.run.setup import Stage


def of_stage(stage: Stage) -> OwnClip | None:
    """Return the feature of a Task that defines it; None if it does not."""
    has = has_step(stage.task, Task, "configure_gradient_clipping")
    return OwnClip(stage.run) if has else None


@contextlib.contextmanager
def logging_step(run: Run) -> Iterator[None]:
    """Within the context the Task logs values of the step in progress."""
    task, before = run.task, run.task._log_target
    task._log_to(LogTarget(run.step.log, run.step.num_samples, on_step=True, on_epoch=False))
    try:
        yield
    finally:
        task._log_to(before)


class OwnClip(Feature):
    """A Task that defines configure_gradient_clipping."""

    name = "configure_gradient_clipping"
    not_by_hand = "Leave it out: Lightning does not call it there either"

    def __init__(self, run: Run) -> None:
        self._run = run

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Let the Task clip before each update; if it has an optimizer_step, within that."""
        is_within = has_step(self._run.task, Task, "optimizer_step")
        return {} if is_within else {"update": self.update}

    def update(self, clip_val: float | None, clip_algorithm: str) -> bool:
        """Update as Engine.step does, with gradients that the Task has clipped."""
        run, task = self._run, self._run.task

        def clip_one(optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
            clip([optimizer], clip_val if value is None else value, algorithm or clip_algorithm)

        task.__dict__["_clip_of_step"] = clip_one
        run.state.half_updated = False  # an error of the Task leaves a checkpoint
        try:
            with logging_step(run):
                for optimizer in run.optimizers:
                    task.configure_gradient_clipping(
                        optimizer,
                        gradient_clip_val=clip_val,
                        gradient_clip_algorithm=clip_algorithm,
                    )
        finally:
            del task.__dict__["_clip_of_step"]
        run.state.half_updated = True
        return run.engine.step()
