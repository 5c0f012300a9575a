"""A step's microbatches: forward, backward, and the hooks around each.

compute_gradients   all microbatches of a step on this rank
  forward_batch     forward of one; its backward follows, unless the engine runs others in between
  forward_again     for another part of the model that this rank has
  backward_batch    backward of one, weighted by its share of the step's samples
  leave_batch       the hooks after it
end_last_batch      after the update: the hook of the last one, which sees the new weights
check_epoch         at the end of an epoch: whether it has trained
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, loss_of
from trainkit.data.feed import Microbatch, Step
from trainkit.engine.base import Calls, HandedOn
from trainkit.errors import DataError, TaskError
from trainkit.run.evaluator import uncounted
from trainkit.run.run import Run
from trainkit.run.step_parts import (
    NOT_GUARDED,
    Forwarded,
    OpenBatch,
    run_backward,
)


class EpochEnded(Exception):
    """A hook has ended the epoch before its next batch."""


def compute_gradients(run: Run, step: Step) -> None:
    """Run forward and backward of this rank's microbatches;
    sums over ranks start in the last one.
    """
    parts = run.step
    parts.open_batch = None
    parts.has_begun = False
    parts.num_ahead = 0
    parts.num_samples = step.num_samples
    if parts.calls is None:
        parts.calls = _calls_of(run)
    run.engine.run_microbatches(step.microbatches, parts.calls)
    drop_old_gradients(run)


def _calls_of(run: Run) -> Calls[Microbatch, Forwarded]:
    """Return what the engine does with each microbatch, the same in all steps."""
    guard = run.step.sync_guard
    calls: Any = [forward_batch, forward_again, backward_batch, leave_batch]
    calls = [partial(call, run) for call in calls]
    if guard is not NOT_GUARDED:  # entered for nothing it would cost each microbatch
        calls = [partial(_guarded, guard, call) for call in calls]
    return Calls(*calls)


def _guarded(guard: AbstractContextManager[None], call: Callable[[Any], Any], given: Any) -> Any:
    with guard:
        return call(given)


def forward_batch(run: Run, microbatch: Microbatch) -> Forwarded:
    """Call the hook before a batch, and run its forward. Its backward follows at once, unless the
    engine runs other microbatches in between.
    """
    parts = run.step
    batch_idx = run.state.batch_idx + parts.num_ahead
    parts.num_ahead += microbatch.ends_batch
    if not microbatch.num_samples:
        drop_old_gradients(run)  # a hook has no other moment
        return _forward_borrowed(run, microbatch, batch_idx)
    _log_of(run, microbatch)
    start_batch(run, microbatch.batch, batch_idx, first=not parts.has_begun)
    parts.has_begun = True
    return _run_step(run, microbatch, batch_idx)


def forward_again(run: Run, forwarded: Forwarded) -> Forwarded:
    """Run the step of a microbatch once more, for another part of the model that this rank has."""
    microbatch, _, batch_idx = forwarded
    if not microbatch.num_samples:
        return _forward_borrowed(run, microbatch, batch_idx)
    _log_of(run, microbatch)
    return _run_step(run, microbatch, batch_idx)


def _log_of(run: Run, microbatch: Microbatch) -> None:
    target = LogTarget(run.step.log, microbatch.num_samples, on_step=True, on_epoch=False)
    run.task._log_to(target)


def _restore_log_of(run: Run, microbatch: Microbatch) -> None:
    """Log as of a microbatch again, if another one's forward, or end, was in between."""
    if run.step.num_ahead > microbatch.ends_batch or run.task._log_target is None:
        _log_of(run, microbatch)


def _run_step(run: Run, microbatch: Microbatch, batch_idx: int) -> Forwarded:
    with run.precision.autocast():
        outputs = call_step(run.task, "training_step", microbatch.batch, batch_idx)
    return Forwarded(microbatch, outputs, batch_idx)


def backward_batch(run: Run, forwarded: Forwarded) -> None:
    """Run backward of a microbatch, its loss weighted by its share of the step's samples;
    all but a rank's last keep their gradients on the rank.
    """
    parts, task = run.step, run.task
    microbatch, outputs, _ = forwarded
    if not microbatch.num_samples:
        _backward_borrowed(run, forwarded)
        return
    _restore_log_of(run, microbatch)
    if outputs is None:
        drop_old_gradients(run)
        parts.weights.skip(microbatch.num_samples)
        if not parts.has_skipped:
            run.say(
                f"{type(task).__name__}.training_step returned None: the batch is skipped."
                " Return the loss to train on it."
            )
            parts.has_skipped = True
        parts.num_skipped += microbatch.ends_batch
        return
    if isinstance(outputs, HandedOn):
        drop_old_gradients(run)
        run_backward(run.engine, microbatch, outputs)
        return
    loss = loss_of(outputs, task)
    parts.watch.look(loss)
    drop_old_gradients(run)
    if parts.finite is not None:
        parts.finite.look(loss, microbatch)
    run.hooks("on_before_backward", loss)
    weighted = parts.weights.weighted(
        loss, outputs, microbatch.num_samples, parts.num_samples, microbatch.batch
    )
    run_backward(run.engine, microbatch, run.precision.scale(weighted))


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


def leave_batch(run: Run, forwarded: Forwarded) -> None:
    """Call the hooks after a microbatch's backward. It ends now, or after the update if it is this
    rank's last of the step.
    """
    microbatch, outputs, batch_idx = forwarded
    if microbatch.num_samples:
        if outputs is not None:
            _restore_log_of(run, microbatch)
            run.hooks("on_after_backward")
        run.task._log_to(None)
        if run.hooks.has("on_train_batch_end"):  # else the batch is not held until the update
            shown = dict(outputs) if isinstance(outputs, Mapping) else {}
            if outputs is not None and not isinstance(outputs, HandedOn):
                shown["loss"] = loss_of(outputs, run.task).detach()
            ended = OpenBatch(microbatch.num_samples, shown, microbatch.batch, batch_idx)
            if microbatch.ends_step:
                run.step.open_batch = ended
            else:
                end_batch(run, ended)
    run.step.num_ahead -= microbatch.ends_batch
    run.state.batch_idx += microbatch.ends_batch


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
        if run.step.own_clear is not None:
            run.step.own_clear()
        run.engine.clear_gradients()


def check_epoch(run: Run) -> None:
    """Check that a complete epoch has trained on a batch.

    Raises:
        DataError: there was none.
        TaskError: the Task has skipped all. Of several ranks, one alone may have skipped its own.
    """
    if run.state.step_in_epoch == 0:
        raise DataError(
            "The training data yielded no batch in this epoch. An iterable must be able to"
            " restart each epoch."
        )
    skipped, run.step.num_skipped = run.step.num_skipped, 0
    if run.world_size == 1 and skipped == run.state.batch_idx:
        raise TaskError(
            f"{type(run.task).__name__}.training_step returned None for all {skipped} batches of"
            " an epoch, so no weight has changed. Return the loss: a tensor, or a dict with"
            " 'loss'."
        )


# with borrowed samples a rank takes part in a round that has none of its own (data/plan.py)


def _forward_borrowed(run: Run, microbatch: Microbatch, batch_idx: int) -> Forwarded:
    """Run forward of borrowed samples; no hook sees it."""
    with uncounted(run.task), run.precision.autocast():
        outputs = call_step(run.task, "training_step", microbatch.batch, batch_idx)
    return Forwarded(microbatch, outputs, batch_idx)


def _backward_borrowed(run: Run, forwarded: Forwarded) -> None:
    """Run backward of borrowed samples: their loss weighs 0."""
    microbatch, outputs, _ = forwarded
    if not isinstance(outputs, HandedOn):
        outputs = run.precision.scale(loss_of(outputs, run.task) * 0)
    run_backward(run.engine, microbatch, outputs)
