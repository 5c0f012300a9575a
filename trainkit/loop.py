"""The training loop, top to bottom.

    fit                     epochs, until a limit or a stop
      train_epoch           the epoch's steps, validation inside or after it
        train_step          one optimizer update:
          compute_gradients   forward and backward of each microbatch, weighted by its share (run/batches.py)
          finish_gradients    reduce over ranks -> unscale -> divide -> hooks
          engine.step         clip, update the weights
          end_last_batch      the hook of the last microbatch, which sees the new weights
        end_step            validation if it is due, hooks; then a signal may end the run
      validate              run/evaluator.py

The gradient of a step is that of the mean loss over all its samples on all ranks: each microbatch's
mean loss is multiplied by (its samples / the step's samples), and gradients are summed. Nothing in
a step waits for the device except the values that `log_every_n_steps` reads (and fp16, whose loss
scale depends on overflows, and Horovod's sums on GPUs, see engine/horovod/engine.py);
`trainer.assert_no_sync` checks it.
"""

from __future__ import annotations

from functools import partial

from trainkit.api.task import LogTarget
from trainkit.data.feed import Step
from trainkit.errors import TaskError, clause
from trainkit.run.batches import EpochEnded, check_epoch, compute_gradients, end_last_batch
from trainkit.run.evaluator import steps_between
from trainkit.run.logged import keep_values, report_unread, with_rate
from trainkit.run.rescue import forget_gradients
from trainkit.run.run import Run
from trainkit.run.step_parts import NO_OBJECTS


def fit(run: Run) -> None:
    """Train until a limit is reached or a stop is requested."""
    run.hooks("on_train_start")
    if _finished(run) and not run.state.owes_validation:
        reached = "the run has reached max_epochs or max_steps. Raise it to continue"
        run.say(f"Nothing is left to train: {clause(run.state.stop_reason or reached)}.")
    while run.state.owes_validation or not _finished(run):
        train_epoch(run)
    if run.state.epoch_values:  # of an epoch that a limit has cut
        _record(run)
    # of ranks that step alone (communication=diloco, local_sgd)
    run.engine.approximation.close_round()
    run.step.eval_weights.show()
    run.hooks("on_train_end")
    report_unread(run, run.step.log)


def train_epoch(run: Run) -> None:
    """Train on the rest of the current epoch, from its current step."""
    state = run.state
    evaluation = run.options.evaluation
    run.before_epoch(state.current_epoch)
    every = evaluation.check_val_every_n_epoch
    validates = every is None or (state.current_epoch + 1) % every == 0
    run.rates.start_epoch(state.current_epoch, state.num_updates)
    run.evaluator.interval = steps_between(
        evaluation.val_check_interval, run.train_feed.num_steps_in(state.current_epoch)
    )
    run.hooks("on_train_epoch_start")
    run.step.metrics.begin(state.step_in_epoch > 0)
    # else a signal came during the validation at the end of this epoch or of the run
    if not state.end_open:
        stopped = _train_steps(run, validates)
        state.epoch_done = not stopped or state.step_in_epoch == run.train_feed.num_steps_in(
            state.current_epoch
        )
        if not state.step_in_epoch:  # a hook may end each epoch before its first step
            run.stopping.check()
        elif state.epoch_done:
            check_epoch(run)
        _report_epoch(run)
        due = stopped or (validates and not run.evaluator.interval and state.step_in_epoch > 0)
        state.end_open = due and state.validated_at != state.global_step
    if state.end_open:
        validate(run, state.epoch_done and validates and not run.evaluator.interval)
        state.end_open = False
    if state.epoch_done:
        complete = not run.evaluator.has_data or state.validated_at >= 0
        fresh = run.callback_metrics.with_plain(state.epoch_values)
        run.rates.after_epoch(state.current_epoch + 1, state.num_updates, fresh, complete)
        run.step.metrics.bring_back()
        run.hooks.log.objects = run.step.metrics  # finished by the hook
        _record(run)
        run.hooks("on_train_epoch_end")
        state.next_epoch()


def _train_steps(run: Run, validates: bool) -> bool:
    """Take the epoch's remaining steps; return whether a limit or a stop ended them."""
    state = run.state
    state.epoch_done = False
    if state.step_open:  # a signal came during its validation
        end_step(run, validates)
    if _finished(run):  # on_train_epoch_start may have requested a stop
        return True
    for step in run.train_feed.steps(state.current_epoch, state.step_in_epoch):
        try:
            train_step(run, step)
        except EpochEnded:
            return False
        end_step(run, validates)
        if _finished(run):
            return True
        run.stopping.check()
    check_epoch(run)
    return False


def end_step(run: Run, validates: bool) -> None:
    """Run the validation that is due inside an epoch, then the hooks."""
    state = run.state
    interval = run.evaluator.interval
    state.step_open = True
    across = run.options.evaluation.check_val_every_n_epoch is None
    if (
        validates
        and interval
        and (state.global_step if across else state.step_in_epoch) % interval == 0
    ):
        validate(run)
    state.step_open = False
    run.hooks("on_train_step_end")
    if run.hooks.log.values:
        _log_of_hooks(run)


def train_step(run: Run, step: Step) -> None:
    """Make one optimizer update from the microbatches of all ranks."""
    state = run.state
    numerics = run.options.numerics
    run.hooks("on_train_step_start")
    is_logged = (state.loop_steps + 1) % run.options.limits.log_every_n_steps == 0
    run.step.log.new_step(is_logged)
    if run.step.manual is not None:
        updated = run.step.manual(step)
    else:
        if run.step.halving is None:
            compute_gradients(run, step)
            run.train_feed.fetch_early()
        else:
            undo = partial(forget_gradients, run, run.step.log.copy(), state.batch_idx)
            run.step.halving(step, partial(compute_gradients, run), undo)
            if objects := run.step.log.objects:
                raise TaskError(NO_OBJECTS.format(type(run.task).__name__, ", ".join(objects)))
        with run.step.sync_guard:
            finish_gradients(run, step)
            state.half_updated = True
            updated = run.step.update(numerics.gradient_clip_val, numerics.gradient_clip_algorithm)
        if updated:
            run.rates.record_update()
        run.hooks("on_after_optimizer_step")
    state.global_step += run.step.manual is None
    state.loop_steps += 1
    state.step_in_epoch += 1
    state.half_updated = False
    state.samples_seen += step.num_samples
    if updated:
        run.rates.after_step(state.num_updates)
    else:
        state.skipped_steps += 1  # the schedule waits for the update that was held back
    if run.step.manual is None:
        end_last_batch(run)
    if is_logged:
        run.step.watch.report()
    if is_logged and run.engine.ranks.is_main:
        run.log_metrics(with_rate(run, run.step.log.step_values()))


def warm_up(run: Run) -> None:
    """Compute the gradients of the first step, so that modules are compiled; nothing is updated."""
    run.step.log.new_step()
    compute_gradients(run, next(run.train_feed.steps(0)))


def finish_gradients(run: Run, step: Step) -> None:
    """Make the gradients those of the whole step on all ranks; nothing changes a weight yet."""
    parts = run.step
    # it has reduced them
    correction = partial(parts.weights.correction, step.num_samples)
    reduced = parts.halving is not None
    run.engine.finish_gradients(correction, reduced)
    if parts.finite is not None:
        parts.finite.decide()
    if not run.hooks.has("on_before_optimizer_step"):
        return
    # what the hook logs is of the step, as in a batch
    run.task._log_to(LogTarget(run.step.log, step.num_samples, on_step=True, on_epoch=False))
    for optimizer in run.optimizers:
        run.hooks("on_before_optimizer_step", optimizer)
    run.task._log_to(None)


def validate(run: Run, is_due: bool = True) -> None:
    """Evaluate on the validation data of all ranks, if there are any."""
    with run.step.eval_weights.shown():
        keep_values(run, run.evaluator.validate(is_due))
    run.state.validated_at = run.state.global_step


def _finished(run: Run) -> bool:
    state = run.state
    limits = run.options.limits
    if limits.max_steps is not None and state.global_step >= limits.max_steps:
        return True
    if limits.max_epochs is not None and state.current_epoch >= limits.max_epochs:
        return True
    return run.should_stop


def _report_epoch(run: Run) -> None:
    # The values of an unfinished epoch are retained: a run with a higher limit may resume from
    # here.
    run.step.watch.report()
    gather = run.engine.data.all_gather_object
    ends = run.state.epoch_done
    values = run.step.log.epoch_values(gather, not ends, run.step.metrics)
    run.step.metrics.set_aside(run.step.log.of_steps)
    if values:
        keep_values(run, values)
        run.log_metrics(values)


def _log_of_hooks(run: Run) -> None:
    """Log what hooks of this step have logged, if the step is logged."""
    if run.state.loop_steps % run.options.limits.log_every_n_steps == 0 and run.is_global_zero:
        run.log_metrics(run.hooks.log.of_step())
    run.hooks.log.forget_step()


def _record(run: Run) -> None:
    state = run.state
    values = with_rate(run, state.epoch_values)
    run.callback_metrics.record(state.current_epoch, state.global_step, values)
