"""The settings of a fit's steps, as an engine asks for them."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.callbacks.divergence_guard import DivergenceGuard
from trainkit.engine.step_settings import StepSettings
from trainkit.run.feature import Feature
from trainkit.run.run import Run


def step_settings(run: Run, features: Iterable[Feature]) -> StepSettings:
    """Return those of a run that has its plan of batches."""
    numerics, plan, task = run.options.numerics, run.batch_plan, run.task
    asked = [callback for callback in run.callbacks if not _is_harmless(callback)]
    others = {
        "trainer.assert_no_sync": numerics.assert_no_sync,
        "batch_weight": type(task).batch_weight is not Task.batch_weight,
    }
    used = {feature.name for feature in features} | {name for name, is_used in others.items() if is_used}
    return StepSettings(
        batch_size=plan.batch_size,
        accumulate=max(plan.accumulate, *(number for _, number in plan.later)) if plan.later else plan.accumulate,
        clip_val=numerics.gradient_clip_val,
        clip_algorithm=numerics.gradient_clip_algorithm,
        precision=numerics.precision,
        used=frozenset(used),
        callbacks=frozenset(cls.__name__ for callback in asked for cls in type(callback).__mro__),
        communication=run.options.communication,
    )


def _is_harmless(callback: Callback) -> bool:
    """Whether it is the guard of every trainer, which compares the weights that ranks hold whole, and no more."""
    return isinstance(callback, DivergenceGuard) and callback.every_n_steps is None
