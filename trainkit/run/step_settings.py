"""The settings of a fit's steps, as an engine asks for them."""

from __future__ import annotations

from trainkit.api.task import Task
from trainkit.engine.step_settings import StepSettings
from trainkit.run.run import Run


def step_settings(run: Run) -> StepSettings:
    """Return those of a run that has its plan of batches."""
    numerics, plan, task = run.options.numerics, run.batch_plan, run.task
    needs = {need: type(callback).__name__ for callback in reversed(run.callbacks) for need in callback.needs_of_engine}
    used = {
        "trainer.halve_batch_on_oom": numerics.halve_batch_on_oom,
        "trainer.compile": bool(numerics.compile),
        "trainer.assert_no_sync": numerics.assert_no_sync,
        "manual_optimization": not task.automatic_optimization,
        "elastic": run.engine.ranks.is_elastic,
        "batch_weight": type(task).batch_weight is not Task.batch_weight,
    }
    return StepSettings(
        batch_size=plan.batch_size,
        accumulate=max(plan.accumulate, *(number for _, number in plan.later)) if plan.later else plan.accumulate,
        clip_val=numerics.gradient_clip_val,
        clip_algorithm=numerics.gradient_clip_algorithm,
        precision=numerics.precision,
        used=frozenset(name for name, is_used in used.items() if is_used),
        callbacks=needs,
        communication=run.options.communication,
    )
