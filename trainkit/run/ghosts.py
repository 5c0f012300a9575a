"""Ghosts: microbatches of borrowed samples,
with which a rank takes part in a round that has none of its own (data/plan.py).
"""

from __future__ import annotations

import contextlib

from trainkit.api.step_call import call_step
from trainkit.api.task import loss_of
from trainkit.data.feed import Microbatch
from trainkit.run.evaluator import uncounted
from trainkit.run.run import Run


def train_ghost(run: Run, microbatch: Microbatch) -> None:
    """Run forward and backward of a ghost: its loss weighs 0, and no hook sees it."""
    with (
        contextlib.nullcontext() if microbatch.is_last else run.engine.no_sync(),
        uncounted(run.task),
    ):
        with run.precision.autocast():
            outputs = call_step(run.task, "training_step", microbatch.batch, run.state.batch_idx)
        run.engine.backward(run.precision.scale(loss_of(outputs, run.task) * 0))
