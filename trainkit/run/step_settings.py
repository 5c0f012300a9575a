"""The settings of a fit's steps, as an engine asks for them."""

from __future__ import annotations

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.callbacks.divergence_guard import DivergenceGuard
from trainkit.engine.step_settings import StepSettings
from trainkit.run.run import Run


def step_settings(run: Run) -> StepSettings:
    """Return those of a run that has its plan of batches."""
    numerics, plan, task = run.options.numerics, run.batch_plan, run.task
    asked = [callback for callback in run.callbacks if not _is_harmless(callback)]
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
        callbacks=frozenset(cls.__name__ for callback in asked for cls in type(callback).__mro__),
        communication=run.options.communication,
    )


def _is_harmless(callback: Callback) -> bool:
    """Whether it is the guard of every trainer, which compares the weights that ranks hold whole, and no more."""
    return isinstance(callback, DivergenceGuard) and callback.every_n_steps is None
