"""The training loop, top to bottom.

    fit                 epochs, until a limit or a stop
      train_epoch       the epoch's steps, validation inside or after it
        train_step      one optimizer update:
          train_batch     forward and backward of one microbatch, weighted by its share of the step's samples
          update          reduce over ranks -> unscale -> clip -> step
        end_step        validation where it is due, hooks; then a signal may end the run
      validate          evaluation.py

The gradient of a step is that of the mean loss over all its samples on all ranks: each microbatch's mean loss is
multiplied by (its samples / the step's samples), and gradients are summed. Nothing in a step waits for the device but
what `log_every_n_steps` reads (and fp16, whose loss scale must know of overflows, and Horovod's sums on GPUs, see
engine/horovod.py); `Run.sync_guard` asserts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.api.dispatch import Hooks
from trainkit.api.state import TrainState
from trainkit.api.task import LogTarget, Task, loss_of
from trainkit.data.feed import Feed, Microbatch, Step
from trainkit.device.precision import Precision
from trainkit.device.sync_guard import allowed_read
from trainkit.engine.base import Engine
from trainkit.errors import DataError, TaskError
from trainkit.metrics.log import MetricLog
from trainkit.optim.clipping import clear_gradients, clip, with_gradients
from trainkit.optim.schedule import LearningRates
from trainkit.run.finite import FiniteLosses
from trainkit.run.oom import NO_OBJECTS, Halving
from trainkit.run.options import Limits


@dataclass
class Run:
    """What the loop works with; built by the Trainer, handed in whole."""

    task: Task
    engine: Engine
    precision: Precision
    optimizers: Sequence[torch.optim.Optimizer]
    rates: LearningRates
    feed: Feed
    limits: Limits
    state: TrainState
    hooks: Hooks
    validate: Callable[[], Mapping[str, float]] | None
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_at: dict[str, int] = field(default_factory=dict)  # the step that each value is of
    log: MetricLog = field(default_factory=MetricLog)
    not_optimized: Sequence[Tensor] = ()
    pulse: Callable[[], None] = lambda: None  # between two steps; raises Preempted where a signal ends the run
    sync_guard: contextlib.AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    finite: FiniteLosses | None = None  # trainer.stop_on_nonfinite
    halving: Halving | None = None  # trainer.halve_batch_on_oom
    weight: Tensor | None = None  # of the step, where the task weighs its batches itself
    task_weighs: bool | None = None  # None until this rank has seen a batch
    agreed: bool = False  # whether all ranks know of `task_weighs`
    half_updated: bool = False  # between an update's first change of weights and its count


def fit(run: Run) -> None:
    """Train until a limit is reached or a stop is requested."""
    run.hooks("on_train_start")
    while run.state.owes_validation or not _finished(run):
        train_epoch(run)
    run.hooks("on_train_end")


def train_epoch(run: Run) -> None:
    """Train on the rest of the current epoch, from the step it stands at."""
    state, limits = run.state, run.limits
    validates = (state.current_epoch + 1) % limits.check_val_every_n_epoch == 0
    run.rates.start_epoch(state.current_epoch, state.global_step - state.skipped_steps)
    run.hooks("on_train_epoch_start")
    if not state.end_open:  # else a signal came within the validation at this epoch's or the run's end
        stopped = _train_steps(run, validates)
        state.epoch_done = not stopped or state.step_in_epoch == run.feed.num_steps_in(state.current_epoch)
        if state.epoch_done and state.step_in_epoch == 0:
            raise DataError(
                "The training data yielded no batch in this epoch. An iterable must be able to start anew each epoch."
            )
        _report_epoch(run)
        due = stopped or (validates and not limits.val_check_interval)
        state.end_open = due and state.validated_at != state.global_step
    if state.end_open:
        validate(run)
        state.end_open = False
    if state.epoch_done:
        complete, updates = run.validate is None or state.validated_at >= 0, state.global_step - state.skipped_steps
        run.rates.after_epoch(state.current_epoch + 1, updates, state.epoch_values, complete)
        run.hooks("on_train_epoch_end")
        state.next_epoch()


def _train_steps(run: Run, validates: bool) -> bool:
    """Take the steps that are left of the epoch; return whether a limit or a stop ended them."""
    state = run.state
    state.epoch_done = False
    if state.step_open:  # a signal came within its validation
        end_step(run, validates)
        if _finished(run):
            return True
    for step in run.feed.steps(state.current_epoch, state.step_in_epoch):
        train_step(run, step)
        end_step(run, validates)
        if _finished(run):
            return True
        run.pulse()
    return False


def end_step(run: Run, validates: bool) -> None:
    """Do what follows an update: the validation that is due inside an epoch, and hooks."""
    state, interval = run.state, run.limits.val_check_interval
    state.step_open = True
    if validates and interval and state.step_in_epoch % interval == 0:
        validate(run)
    state.step_open = False
    run.hooks("on_train_step_end")


def train_step(run: Run, step: Step) -> None:
    """Make one optimizer update from the microbatches of all ranks."""
    state = run.state
    run.hooks("on_train_step_start")
    is_logged = (state.global_step + 1) % run.limits.log_every_n_steps == 0
    run.log.new_step(is_logged)
    if run.halving is None:
        compute_gradients(run, step)
    else:
        run.halving(step, partial(compute_gradients, run), partial(forget_gradients, run, run.log.copy(), state.batch_idx))
        if run.log.objects:
            raise TaskError(NO_OBJECTS.format(type(run.task).__name__, ", ".join(run.log.objects)))
    with run.sync_guard:
        updated = update(run, step)
    state.global_step += 1
    state.step_in_epoch += 1
    run.half_updated = False
    state.samples_seen += step.num_samples
    if updated:
        run.rates.after_step(state.global_step - state.skipped_steps)
    else:
        state.skipped_steps += 1  # the schedule waits for the update that was held back
    if is_logged and run.engine.ranks.is_main:
        run.hooks("on_metrics", run.log.step_values() | {"lr": run.rates.current()[0]}, state.global_step)


def compute_gradients(run: Run, step: Step) -> None:
    """Run forward and backward of this rank's microbatches; sums over ranks start in the last one."""
    for microbatch in step.microbatches:
        with run.sync_guard:
            train_batch(run, microbatch, step)
        run.state.batch_idx += microbatch.ends_batch


def train_batch(run: Run, microbatch: Microbatch, step: Step) -> None:
    """Run forward and backward of one microbatch; all but a rank's last keep their gradients on the rank."""
    task, batch, batch_idx = run.task, microbatch.batch, run.state.batch_idx
    task._log_to(LogTarget(run.log, microbatch.num_samples, on_step=True, on_epoch=False))
    run.hooks("on_train_batch_start", batch, batch_idx)
    with contextlib.nullcontext() if microbatch.is_last else run.engine.no_sync():
        with run.precision.autocast():
            outputs = task.training_step(batch, batch_idx)
        loss = loss_of(outputs, task)
        if run.finite is not None:
            run.finite.look(loss, microbatch)
        run.hooks("on_before_backward", loss)
        run.engine.backward(run.precision.scale(_weighted(run, loss, outputs, microbatch, step)))
    run.hooks("on_after_backward")
    run.hooks("on_train_batch_end", outputs, batch, batch_idx)
    task._log_to(None)


def update(run: Run, step: Step) -> bool:
    """Reduce, unscale, clip and step; return False where mixed precision held the update back."""
    if run.halving is None:  # it has reduced them
        run.engine.reduce_gradients()
    if run.finite is not None:
        run.finite.decide()
    run.precision.unscale(run.optimizers)
    if not run.agreed:
        _agree_on_weights(run)
    if run.task_weighs:
        _divide_by_task_weight(run, step)
    clip(run.optimizers, run.limits.gradient_clip_val, run.limits.gradient_clip_algorithm)
    for optimizer in run.optimizers:
        run.hooks("on_before_optimizer_step", optimizer)
    run.half_updated = True
    updated = run.precision.step(run.optimizers)
    for optimizer in run.optimizers:
        run.hooks("on_before_zero_grad", optimizer)
        clear_gradients(optimizer)
    for parameter in run.not_optimized:
        parameter.grad = None  # it would be summed over ranks again and again
    return updated


def forget_gradients(run: Run, log: MetricLog, batch_idx: int) -> None:
    """Put a run where it stood before the gradients of this step were computed."""
    run.task.zero_grad(set_to_none=True)
    run.log, run.weight, run.state.batch_idx = log.copy(), None, batch_idx
    if run.finite is not None:
        run.finite.forget()


def validate(run: Run) -> None:
    """Evaluate on the validation data of all ranks, where there are any."""
    _keep(run, {} if run.validate is None else run.validate())
    run.state.validated_at = run.state.global_step


def _weighted(run: Run, loss: Tensor, outputs: Any, microbatch: Microbatch, step: Step) -> Tensor:
    """Return the loss times the part of the step's samples that this microbatch holds.

    A task that returns "num_samples" weighs its batches itself. The step's total is then known only at its end, so
    the loss is weighted against the planned number of samples here and the gradients are corrected after their sum.
    """
    own = outputs.get("num_samples") if isinstance(outputs, Mapping) else None
    if run.task_weighs is None:
        run.task_weighs = own is not None
    if run.task_weighs != (own is not None):
        raise TaskError(_some_weights(run.task))
    if own is None:
        whole = microbatch.num_samples == step.num_samples
        return loss if whole else loss * (microbatch.num_samples / step.num_samples)
    device = run.engine.device
    if isinstance(own, Tensor):
        weight = own.to(device, torch.float64)
    else:  # a number is filled in on the device: copied to it, it would be waited for
        weight = torch.full((), own, dtype=torch.float64, device=device)
    run.weight = weight if run.weight is None else run.weight + weight
    return loss * (weight / step.num_samples)


def _agree_on_weights(run: Run) -> None:
    """Tell all ranks, once a run, whether the task weighs its batches itself: one without a sample in a step cannot know."""
    with allowed_read():
        own = torch.tensor(float(run.task_weighs or False), device=run.engine.device)
        anybody = bool(run.engine.comm.all_reduce(own) > 0)
    if run.task_weighs is not None and run.task_weighs != anybody:
        raise TaskError(_some_weights(run.task))
    run.task_weighs, run.agreed = anybody, True


def _some_weights(task: Task) -> str:
    return f"{type(task).__name__}.training_step returned 'num_samples' for some batches only; return it for all or none."


def _divide_by_task_weight(run: Run, step: Step) -> None:
    held = run.weight if run.weight is not None else torch.zeros((), dtype=torch.float64, device=run.engine.device)
    total = run.engine.comm.all_reduce(held)
    correction = torch.where(total == 0, total, step.num_samples / total)  # where all is masked there is no gradient
    run.weight = None
    for parameter in with_gradients(run.optimizers):
        parameter.grad.mul_(correction.to(parameter.grad.dtype))


def _finished(run: Run) -> bool:
    state, limits = run.state, run.limits
    if limits.max_steps is not None and state.global_step >= limits.max_steps:
        return True
    if limits.max_epochs is not None and state.current_epoch >= limits.max_epochs:
        return True
    return state.should_stop


def _report_epoch(run: Run) -> None:
    # Of a part of an epoch, what was collected stays: a run with a higher limit may go on from here.
    values = run.log.epoch_values(run.engine.comm.all_gather_object, keep=not run.state.epoch_done)
    if values:
        _keep(run, values)
        run.hooks("on_metrics", values, run.state.global_step)


def _keep(run: Run, values: Mapping[str, float]) -> None:
    run.metrics.update(values)
    run.metrics_at |= dict.fromkeys(values, run.state.global_step)
    run.state.epoch_values.update(values)
