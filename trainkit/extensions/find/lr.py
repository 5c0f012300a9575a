"""find_lr: the learning-rate range test, over all ranks of the job."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.options import Options
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.data.feed import Microbatch
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.find.curve import Divergence, LRCurve, rates_between
from trainkit.extensions.find.trial_run import copy_of, steps_of, train, trial_run
from trainkit.run.data_sources import DataSources
from trainkit.run.run import Run
from trainkit.trainer import Trainer

LEAST_STEPS = 10


class _Losses(Callback):
    """Adds up the losses of a step's microbatches by their weights:
    the Task's own ("num_samples"), or their samples.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._samples = 0

    def watched(self, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
        """Pass microbatches on, noting the samples of the current one."""
        for microbatch in microbatches:
            self._samples = microbatch.num_samples
            yield microbatch

    def on_train_batch_end(
        self, trainer: RunView, task: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add this microbatch's loss; nothing is read off the device."""
        if "loss" not in outputs:
            return  # the Task has skipped the batch
        own = outputs.get("num_samples")
        if own is None and type(task).batch_weight is not Task.batch_weight:
            own = task.batch_weight(batch)
        weight = torch.as_tensor(
            self._samples if own is None else own, dtype=torch.float64, device=trainer.engine.device
        )
        both = torch.stack([outputs["loss"].double() * weight, weight])
        self._sums = both if self._sums is None else self._sums + both

    def mean(self, run: Run) -> float:
        """Return the mean over all samples of the step on all ranks, the same number on each."""
        own = (
            self._sums
            if self._sums is not None
            else torch.zeros(2, dtype=torch.float64, device=run.engine.device)
        )
        self._sums = None
        total, weight = run.engine.data.all_reduce(own).tolist()
        value: float = run.engine.comm.broadcast_object(total / weight if weight else math.nan)
        return value


def find_lr(
    task: Task,
    train_dataloaders: Any = None,
    datamodule: DataModule | None = None,
    trainer: Trainer | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    early_stop_threshold: float | None = 4.0,
) -> LRCurve:
    """Train a copy of the task for some steps while the learning rate rises exponentially, and
    return losses and rates.

    Call it on all ranks. Batches, precision, clipping and engine are those of `trainer`; all
    parameter groups are scaled by one factor; warm-up, schedulers and callbacks take no part. The
    task, random numbers and the order of data stay as they are, bit for bit.

    Args:
        task: the Task; a copy of it is trained.
        train_dataloaders: see Trainer.fit. A dataset with a length.
        datamodule: provides it, in place of that.
        trainer: its settings are used, and it stays as it is. Default: Trainer(max_epochs=1).
        min_lr: the first rate, above 0, of the parameter group with the largest one.
        max_lr: the last rate, above `min_lr`.
        num_training: steps, 10 or more.
        early_stop_threshold: the sweep ends once the smoothed loss exceeds this multiple of its
            lowest, above 1; None: only if a loss is not finite.

    Returns:
        The curve; `suggestion()` and `valley()` are rates to try, in the user's terms (the
        contract's factor multiplies them).

    Raises:
        ConfigError: an argument is not legal, there is no rate to find, or the data is a stream.
        TaskError: the task updates its weights itself, or cannot be copied.
    """
    data = DataSources({"train": train_dataloaders}, datamodule)
    chosen = trainer or Trainer(max_epochs=1, enable_progress_bar=False, logger=False)
    swept = copy_of(task), data, chosen.options
    return sweep(*swept, min_lr, max_lr, num_training, early_stop_threshold)


def sweep(
    task: Task,
    data: DataSources,
    options: Options,
    min_lr: float,
    max_lr: float,
    steps: int,
    threshold: float | None,
) -> LRCurve:
    """Do what `find_lr` does with the task itself, whose weights then are of no use."""
    _check(min_lr, max_lr, steps, threshold)
    if not task.automatic_optimization:
        raise TaskError(
            f"{type(task).__name__}.automatic_optimization is false: it updates its weights itself,"
            " maybe at several rates, so there is no one rate to find. Try rates by a sweep:"
            " python -m trainkit fit -m conf=NAME optimizer.lr=0.01,0.1"
        )
    if has_step(task, Task, "optimizer_step"):
        raise TaskError(
            f"{type(task).__name__}.optimizer_step may set rates itself, so that those of this search"
            " would not be tried. Leave it out here, or try rates by a sweep: python -m trainkit fit"
            " -m conf=NAME optimizer.lr=0.01,0.1"
        )
    losses = _Losses()
    ends = Divergence(threshold)
    curve = LRCurve([], [])
    with trial_run(task, data, options, [losses]) as run:
        base = max(run.rates.user_lrs, default=0.0)
        if base <= 0:
            raise ConfigError(
                f"{type(task).__name__}.configure_optimizers returned no learning rate above 0, so"
                " there is none to scale. Give each parameter group its rate relative to the"
                " others, as lr=0.1."
            )
        curve = replace(curve, factor=run.rates.factor)
        run.hooks("on_fit_start")
        run.hooks("on_train_start")
        for rate, step in zip(rates_between(min_lr, max_lr, steps), steps_of(run), strict=False):
            run.rates.hold([own * rate / base for own in run.rates.user_lrs], run.state.num_updates)
            train(run, step, losses.watched)
            loss = losses.mean(run)
            if why := ends.look(loss):
                curve = replace(curve, stopped=f"at a rate of {rate:.3g} {why}")
            if math.isfinite(loss):
                curve.lrs.append(rate)
                curve.losses.append(loss)
            if curve.stopped:
                break
    return curve


def _check(min_lr: float, max_lr: float, steps: int, threshold: float | None) -> None:
    if not 0 < min_lr < math.inf:
        raise ConfigError(f"min_lr is {min_lr}; it must be a rate above 0, as 1e-8.")
    if not min_lr < max_lr < math.inf:
        raise ConfigError(
            f"max_lr is {max_lr}, and min_lr is {min_lr}; the range must rise: give a max_lr above"
            " min_lr."
        )
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"num_training is {steps}; it must be {LEAST_STEPS} or more: a slope needs points."
        )
    if threshold is not None and not threshold > 1:
        raise ConfigError(
            f"early_stop_threshold is {threshold}; it must be above 1: it multiplies the lowest"
            " loss. None sweeps to the end."
        )
