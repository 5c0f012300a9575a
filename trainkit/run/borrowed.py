"""Microbatches of borrowed samples,
with which a rank takes part in a round that has none of its own (data/plan.py).
"""

from __future__ import annotations

from trainkit.api.step_call import call_step
from trainkit.api.task import loss_of
from trainkit.data.feed import Microbatch
from trainkit.engine.base import HandedOn
from trainkit.run.evaluator import uncounted
from trainkit.run.run import Run
from trainkit.run.step_parts import Forwarded, run_backward


def forward_borrowed(run: Run, microbatch: Microbatch, batch_idx: int) -> Forwarded:
    """Run forward of borrowed samples; no hook sees it."""
    with uncounted(run.task), run.precision.autocast():
        outputs = call_step(run.task, "training_step", microbatch.batch, batch_idx)
    return Forwarded(microbatch, outputs, batch_idx)


def backward_borrowed(run: Run, forwarded: Forwarded) -> None:
    """Run backward of borrowed samples: their loss weighs 0."""
    microbatch, outputs, _ = forwarded
    if not isinstance(outputs, HandedOn):
        outputs = run.precision.scale(loss_of(outputs, run.task) * 0)
    run_backward(run.engine, microbatch, outputs)
