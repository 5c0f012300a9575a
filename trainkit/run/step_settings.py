"""The settings of a fit's steps, as an engine asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainkit.api.task import Task
from trainkit.data.feed import MapFeed
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
        sample=sample_of(run),
    )


def sample_of(run: Run) -> Callable[[], Any] | None:
    """Return what returns a batch of the training data's first sample; None for a stream."""
    return run.train_feed.first_sample if isinstance(run.train_feed, MapFeed) else None
