"""A fit that is built for measuring, and leaves nothing behind:
files, random numbers, the order of data.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainkit import loop
from trainkit.api.callback import Callback
from trainkit.api.options import Options
from trainkit.api.task import Task, check_overrides
from trainkit.callbacks.step_clock import StepClock, Times
from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.data.feed import MapFeed, Step
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.by_hand.task import LoopTask
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.run import Run
from trainkit.run.setup import Stage

_FEWEST_STEPS = 3  # that a measurement is made of


def copy_of(task: Task) -> Task:
    """Return a copy of a Task to train, so that the user's own stays as it is: weights, buffers,
    device, every attribute.

    Raises:
        TaskError: it cannot be copied.
    """
    try:
        return copy.deepcopy(task)
    except (TypeError, RuntimeError) as error:
        raise TaskError(
            f"{type(task).__name__} cannot be copied ({error}), and a finder trains a copy. Make"
            " what cannot be copied in setup(), or use the command: python -m trainkit find ..."
        ) from error


def trial_task(task: Task) -> Task:
    """Return the task that a trial of a command trains: a copy; of a Loop the task itself, whose
    model the user's own loop computes with. It starts each trial with optimizers as they were given.
    """
    return task if isinstance(task, LoopTask) else copy_of(task)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore this process's random numbers at the end of the context."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextlib.contextmanager
def trial_run(
    task: Task,
    data: DataSources,
    options: Options,
    callbacks: Sequence[Callback] = (),
    reduces_first: bool = False,
) -> Iterator[Run]:
    """Build a fit of a task that may be trained, without the user's callbacks and loggers; restore
    random numbers at the end.

    Args:
        reduces_first: whether the caller sums gradients over ranks before `finish_gradients`, as
            halve_batch_on_oom does.

    Raises:
        ConfigError: the training data is a stream, which cannot be left as it was.
    """
    check_overrides(task, ("training_step", "configure_optimizers"))
    with random_numbers_kept(), tempfile.TemporaryDirectory(prefix="trainkit-find-") as folder:
        batch = replace(options.batch, lr_warmup_steps=None, lr_warmup_epochs=None)
        numerics = replace(
            options.numerics, stop_on_nonfinite=False, halve_batch_on_oom=reduces_first
        )
        options = replace(options, run_dir=folder, batch=batch, numerics=numerics)
        with Stage("fit", task, data, callbacks, options) as stage:
            if not stage.engine.ranks.takes_part:
                raise ConfigError(
                    "engine.process_set leaves this rank out; a finder needs all ranks. Leave it"
                    " out."
                )
            run = build_run(stage, StartFrom())
            with _generators_kept(run):
                yield run


@contextlib.contextmanager
def _generators_kept(run: Run) -> Iterator[None]:
    """Restore the generators of the user's loader and sampler."""
    if not isinstance(run.train_feed, MapFeed):
        raise ConfigError(
            "The training data is a stream, which cannot be read and left as it was. Give find a"
            " dataset with a length, say of its first thousand samples:"
            " train_dataloaders=DataLoader(samples, batch_size)."
        )
    source = run.train_feed.source
    generators = [source.options.get("generator"), getattr(source.sampler, "generator", None)]
    held = [(own, own.get_state()) for own in generators if isinstance(own, torch.Generator)]
    try:
        yield
    finally:
        for own, state in held:
            own.set_state(state)


def steps_of(run: Run) -> Generator[Step, None, None]:
    """Yield the run's steps, epoch after epoch, without end."""
    while True:
        run.rates.start_epoch(run.current_epoch, run.state.num_updates)
        run.hooks("on_train_epoch_start")
        yield from run.train_feed.steps(run.current_epoch)
        run.hooks("on_train_epoch_end")
        run.state.next_epoch()


def measured(
    run: Run, clock: StepClock, warm: int, steps: int, most_s: float = math.inf
) -> tuple[Times, int]:
    """Train, and return the times of this rank's steps after the first ones, the samples of all
    ranks in them.

    Args:
        run: of `trial_run`, with the clock among its callbacks.
        clock: measures.
        warm: steps before the measured ones; 1 or more.
        steps: that are measured.
        most_s: seconds; if the last warm step says that the steps would take longer, fewer are
            measured, but three.
    """
    run.hooks("on_fit_start")
    run.hooks("on_train_start")
    coming = steps_of(run)
    for step in itertools.islice(coming, warm):
        start = time.perf_counter()
        train(run, step)
    if most_s < math.inf:
        step_s = max(run.engine.comm.all_gather_object(time.perf_counter() - start))
        steps = min(steps, max(_FEWEST_STEPS, int(most_s / step_s)))
    before = clock.read()
    samples = run.state.samples_seen
    for step in itertools.islice(coming, steps):
        train(run, step)
    times = clock.read() - before
    samples = run.state.samples_seen - samples
    coming.close()  # now, while the loader is there
    return times, samples


def train(
    run: Run, step: Step, before: Callable[[Any], Any] = lambda microbatches: microbatches
) -> None:
    """Take one step, as the loop does, without validation.
    `before` may look at its microbatches as they come.
    """
    loop.train_step(run, step._replace(microbatches=before(step.microbatches)))
    run.hooks("on_train_step_end")
    run.hooks.log.forget_step()
