"""The feature of a Task that has a hook around an update."""

from __future__ import annotations

from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage


def of_stage(stage: Stage) -> Feature | None:
    """Return it; None if the Task has none."""
    if not has_step(stage.task, Task, "optimizer_step"):
        return None
    from trainkit.extensions.own_update.own_step import OwnStep

    return OwnStep(stage.run)
