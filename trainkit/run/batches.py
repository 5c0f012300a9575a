"""A step's microbatches: forward, backward, and the hooks around each.

compute_gradients   all microbatches of a step on this rank
  forward_batch     forward of one; its backward follows, unless the engine runs others in between
  backward_batch    backward of one, weighted by its share of the step's samples
end_last_batch      after the update: the hook of the last one, which sees the new weights
train_manually      a batch of a Task that updates its weights itself
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, loss_of
from trainkit.data.feed import Microbatch, Step
from trainkit.engine.base import HandedOn
from trainkit.errors import TaskError
from trainkit.run.borrowed import backward_borrowed, forward_borrowed
from trainkit.run.run import Run
from trainkit.run.step_parts import Forwarded, ManualBatches, OpenBatch, on_this_rank


class EpochEnded(Exception):
    """A hook has ended the epoch before its next batch."""


def compute_gradients(run: Run, step: Step) -> None:
    """Run forward and backward of this rank's microbatches;
    sums over ranks start in the last one.
    """
    parts = run.step
    state = run.state
    parts.open_batch = None
    parts.has_begun = False
    parts.num_ahead = 0

    def forward(microbatch: Microbatch) -> Forwarded:
        """Its backward follows at once, unless the engine runs other microbatches in between."""
        batch_idx = state.batch_idx + parts.num_ahead
        parts.num_ahead += microbatch.ends_batch
        with parts.sync_guard:
            if microbatch.num_samples:
                return forward_batch(run, microbatch, batch_idx)
            drop_old_gradients(run)  # a hook has no other moment
            return forward_borrowed(run, microbatch, batch_idx)

    def backward(forwarded: Forwarded) -> None:
        microbatch = forwarded.microbatch
        with parts.sync_guard:
            if microbatch.num_samples:
                backward_batch(run, step, forwarded)
            else:
                backward_borrowed(run, forwarded)
        parts.num_ahead -= microbatch.ends_batch
        state.batch_idx += microbatch.ends_batch

    run.engine.run_microbatches(step.microbatches, forward, backward)
    drop_old_gradients(run)


def train_batch(run: Run, microbatch: Microbatch, step: Step) -> None:
    """Run forward and backward of one microbatch."""
    backward_batch(run, step, forward_batch(run, microbatch, run.state.batch_idx))


def forward_batch(run: Run, microbatch: Microbatch, batch_idx: int) -> Forwarded:
    """Call the hook before a batch, and run its forward."""
    task = run.task
    batch = microbatch.batch
    _log_to_step(run, microbatch)
    start_batch(run, batch, batch_idx, first=not run.step.has_begun)
    run.step.has_begun = True
    with on_this_rank(run.engine, microbatch), run.precision.autocast():
        outputs = call_step(task, "training_step", batch, batch_idx)
    return Forwarded(microbatch, outputs, batch_idx)


def backward_batch(run: Run, step: Step, forwarded: Forwarded) -> None:
    """Run backward of a microbatch, its loss weighted by its share of the step's samples, and the
    hooks around it; all but a rank's last keep their gradients on the rank.
    """
    task = run.task
    microbatch, outputs, batch_idx = forwarded
    if run.step.num_ahead > microbatch.ends_batch:  # another one's forward was after this one's
        _log_to_step(run, microbatch)
    if outputs is None:
        drop_old_gradients(run)
        run.step.weights.skip(microbatch.num_samples)
        if not run.step.has_skipped:
            run.say(
                f"{type(task).__name__}.training_step returned None: the batch is skipped."
                " Return the loss to train on it."
            )
            run.step.has_skipped = True
        leave_batch(run, microbatch, None, None, batch_idx)
        return
    if isinstance(outputs, HandedOn):
        drop_old_gradients(run)
        with on_this_rank(run.engine, microbatch):
            run.engine.backward(outputs)
        run.hooks("on_after_backward")
        leave_batch(run, microbatch, None, None, batch_idx)
        return
    loss = loss_of(outputs, task)
    run.step.watch.look(loss)
    drop_old_gradients(run)
    if run.step.finite is not None:
        run.step.finite.look(loss, microbatch)
    run.hooks("on_before_backward", loss)
    weighted = run.step.weights.weighted(
        loss, outputs, microbatch.num_samples, step.num_samples, microbatch.batch
    )
    with on_this_rank(run.engine, microbatch):
        run.engine.backward(run.precision.scale(weighted))
    run.hooks("on_after_backward")
    leave_batch(run, microbatch, outputs, loss, batch_idx)


def _log_to_step(run: Run, microbatch: Microbatch) -> None:
    target = LogTarget(run.step.log, microbatch.num_samples, on_step=True, on_epoch=False)
    run.task._log_to(target)


def start_batch(run: Run, batch: Any, batch_idx: int, first: bool) -> None:
    """Call the hook before a batch.

    Args:
        first: whether it is this rank's first of the step; the epoch can end there, and not within
            a step.

    Raises:
        EpochEnded: a hook returned -1.
        TaskError: it did, within a step, or where other ranks would train on.
    """
    if not run.hooks.ends_epoch("on_train_batch_start", batch, batch_idx):
        return
    if run.world_size == 1 and first:
        raise EpochEnded
    where = (
        f"on one of {run.world_size} ranks"
        if run.world_size > 1
        else "within a step of several batches"
    )
    raise TaskError(
        f"on_train_batch_start returned -1, which ends the epoch, {where}. Set"
        " trainer.limit_train_batches, or self.trainer.should_stop = True on all ranks."
    )


def leave_batch(
    run: Run, microbatch: Microbatch, outputs: Any, loss: Tensor | None, batch_idx: int
) -> None:
    """End a microbatch now, or after the update if it is this rank's last of the step.

    Args:
        loss: of `outputs`; None if the Task has skipped the batch.
    """
    run.task._log_to(None)
    if not run.hooks.has("on_train_batch_end"):
        return  # and the batch is not held until the update
    shown = dict(outputs) if isinstance(outputs, Mapping) else {}
    if loss is not None:
        shown["loss"] = loss.detach()
    ended = OpenBatch(microbatch.num_samples, shown, microbatch.batch, batch_idx)
    if microbatch.ends_step:
        run.step.open_batch = ended
    else:
        end_batch(run, ended)


def end_batch(run: Run, ended: OpenBatch) -> None:
    """Call the hook of a microbatch:
    after its backward, or after the update if it was this rank's last of the step.
    """
    run.task._log_to(LogTarget(run.step.log, ended.num_samples, on_step=True, on_epoch=False))
    run.hooks("on_train_batch_end", ended.outputs, ended.batch, ended.batch_idx)
    run.task._log_to(None)


def end_last_batch(run: Run) -> None:
    """Call the hook of this rank's last microbatch of the step, which sees the new weights;
    then drop the gradients.
    """
    ended = run.step.open_batch
    run.step.open_batch = None
    with run.step.sync_guard:
        if ended is not None:
            end_batch(run, ended)
        clear_gradients(run)


def clear_gradients(run: Run) -> None:
    """Drop the gradients after an update, unless a hook reads them before the next backward."""
    if run.step.clears_late:
        run.step.has_old = True
    else:
        run.engine.clear_gradients()


def drop_old_gradients(run: Run) -> None:
    """Drop the gradients of the last step, if they are still there,
    after the hook that reads them.
    """
    if run.step.has_old:
        run.step.has_old = False
        for optimizer in run.optimizers:
            run.hooks("on_before_zero_grad", optimizer)
        run.engine.clear_gradients()


def train_manually(run: Run, step: Step, manual: ManualBatches) -> bool:
    """Let the Task train on this rank's batch and update the weights itself."""
    task = run.task
    for microbatch in manual.batches(step):
        batch = microbatch.batch
        batch_idx = run.state.batch_idx
        task._log_to(LogTarget(run.step.log, microbatch.num_samples, on_step=True, on_epoch=False))
        start_batch(run, batch, batch_idx, first=True)
        with manual.batch(microbatch.num_samples, step.num_samples), run.precision.autocast():
            outputs = call_step(task, "training_step", batch, batch_idx)
        run.hooks("on_train_batch_end", outputs, batch, batch_idx)
        task._log_to(None)
        run.state.batch_idx += 1
    return manual.updated
