"""The feeds of a fit: training data under the settings of batch and limits, and validation data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from trainkit.api.options import EvaluationOptions
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.data.feed import Feed, StreamFeed
from trainkit.data.streams import OwnStream
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import Accumulation, derive_accumulation
from trainkit.run.data_sources import TrainingData
from trainkit.run.evaluator import ValidationData, steps_between
from trainkit.run.setup import Stage
from trainkit.run.stage_feeds import Feeds


def make_feeds(stage: Stage, training: TrainingData, shares: Sequence[int] | None = None) -> Feeds:
    """Make the feeds of a fit, and return them; stage and evaluator have them.

    Raises:
        ConfigError: no validation would ever run.
    """
    feeds, options = stage.feeds, stage.options
    declared = feeds.maker.declared
    changes = derive_accumulation(
        training.batch_size,
        declared,
        options.batch.accumulate_grad_batches,
        options.batch.global_batch_size,
    )
    train = _training_feed(stage, training, changes, shares)
    feeds.keep([train])
    val_data = _validation_data(stage)
    val = feeds.of_evaluation(val_data, "val_dataloaders", options.evaluation.limit_val_batches)
    feeds.keep(val)
    _check_interval(options.evaluation, train, changes, bool(val))
    feeds.of_fit = Feeds(train, val, val_data, training.batch_size, declared, changes, shares)
    stage.run.evaluator.data = _for_evaluator(stage)
    stage.run.callback_metrics.suffixes |= {f"/{feed.name}" for feed in val if feed.name}
    return feeds.of_fit


def _training_feed(
    stage: Stage, training: TrainingData, changes: Accumulation, shares: Sequence[int] | None
) -> Feed:
    options, maker, source = stage.options.batch, stage.feeds.maker, training.source
    if options.overfit_batches is not None and source is not None:
        # the same batches again and again
        source = dataclasses.replace(source, shuffle=False, sampler=None)
    if shares is not None and stage.is_elastic:
        raise ConfigError(
            "trainer.rank_shares is set, but the job is elastic: its ranks may change. Leave one of"
            " the two out."
        )
    feed = maker.for_training(
        training.data,
        source,
        changes,
        options.limit_train_batches,
        stage.feeds.mover(),
        options.pad_last_step,
        shares,
    )
    if not isinstance(feed, StreamFeed):
        return feed
    feed.repeats = options.overfit_batches is not None
    ranks = stage.engine.ranks.data_size
    if isinstance(feed.stream, OwnStream) and maker.declared != ranks:
        stage.run.say(
            f"Each rank reads a part of the training data of its own: for the {changes[0][1]}"
            f" microbatches of each of {maker.declared} ranks a step takes {feed.microbatches_in(0)}"
            f" of each of {ranks}, and of this epoch samples may be left out or come again."
        )
    return feed


def _validation_data(stage: Stage) -> Any:
    """Return the validation data; None if there is none, or the Task has no step for it."""
    data = stage.data.find("val", stage.task)
    if data is None or has_step(stage.task, Task, "validation_step"):
        return data
    stage.run.say(
        f"There is validation data, and {type(stage.task).__name__} has no validation_step:"
        " training runs without validation."
    )
    return None


def _check_interval(
    options: EvaluationOptions, train: Feed, changes: Accumulation, validates: bool
) -> None:
    """Refuse an interval that no epoch is long enough for."""
    across = options.check_val_every_n_epoch is None
    for epoch, _ in changes:
        steps = train.num_steps_in(epoch)
        interval = steps_between(options.val_check_interval, steps)
        if validates and interval and steps is not None and interval > steps and not across:
            raise ConfigError(
                f"trainer.val_check_interval is {interval}, but epoch {epoch} has {steps} steps:"
                " there would never be a validation in it. Use a smaller one, null for the epoch's"
                " end, or trainer.check_val_every_n_epoch=null to count steps across epochs."
            )


def _for_evaluator(stage: Stage) -> ValidationData:
    """Return what the evaluator of a fit needs:
    the feeds, and feeds of the same data for the sanity check.
    """
    run = stage.run
    feeds = stage.feeds.of_fit

    def sanity_feeds(limit: int | None) -> list[Feed]:
        full = stage.options.evaluation.limit_val_batches
        counts = [count for count in (limit, full) if isinstance(count, int)]
        share = min(counts, default=full)
        return stage.feeds.of_evaluation(feeds.val_data, "val_dataloaders", share)

    def check() -> None:  # the run has `stopping` later
        run.stopping.check()

    return ValidationData(feeds.val, sanity_feeds, lambda: run.step.log.prog_bar, check)
