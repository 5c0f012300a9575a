"""The settings of a fit's steps, as an engine asks for them."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.api.task import Task
from trainkit.engine.step_settings import StepSettings
from trainkit.run.feature import Feature
from trainkit.run.run import Run


def step_settings(run: Run, features: Iterable[Feature]) -> StepSettings:
    """Return those of a run that has its plan of batches."""
    numerics = run.options.numerics
    plan = run.batch_plan
    task = run.task
    needs = {
        need: type(callback).__name__
        for callback in reversed(run.callbacks)
        for need in callback.needs_of_engine
    }
    others = {
        "trainer.assert_no_sync": numerics.assert_no_sync,
        "batch_weight": type(task).batch_weight is not Task.batch_weight,
    }
    used = {feature.name for feature in features} | {
        name for name, is_used in others.items() if is_used
    }
    return StepSettings(
        batch_size=plan.batch_size,
        accumulate=(
            max(plan.accumulate, *(number for _, number in plan.later))
            if plan.later
            else plan.accumulate
        ),
        clip_val=numerics.gradient_clip_val,
        clip_algorithm=numerics.gradient_clip_algorithm,
        precision=numerics.precision,
        used=frozenset(used),
        callbacks=needs,
        communication=run.options.communication,
    )
