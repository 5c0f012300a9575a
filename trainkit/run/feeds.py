"""The feeds of a fit: training data under the settings of batch and limits, and validation data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.data.feed import Feed, StreamFeed
from trainkit.data.streams import OwnStream
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import derive_accumulation
from trainkit.run.data_sources import TrainingData
from trainkit.run.evaluator import ValidationData, steps_between
from trainkit.run.feed_maker import train_feed
from trainkit.run.setup import Stage
from trainkit.run.stage_feeds import Feeds


def make_feeds(
    stage: Stage, training: TrainingData, declared: int, shares: Sequence[int] | None = None
) -> Feeds:
    """Make the feeds of a fit with settings meant for `declared` ranks, and return them; stage and
    evaluator have them.

    Raises:
        ConfigError: no validation would ever run.
    """
    options = stage.options.batch
    engine = stage.engine
    source = training.source
    changes = derive_accumulation(
        training.batch_size, declared, options.accumulate_grad_batches, options.global_batch_size
    )
    if options.overfit_batches is not None and source is not None:
        # the same batches again and again
        source = dataclasses.replace(source, shuffle=False, sampler=None)
    limit = options.limit_train_batches
    seed = stage.options.seed
    pad = options.pad_last_step
    if shares is not None and stage.is_elastic:
        raise ConfigError(
            "trainer.rank_shares is set, but the job is elastic: its ranks may change. Leave one of"
            " the two out."
        )
    feed = train_feed(
        training.data,
        source,
        changes,
        limit,
        seed,
        engine,
        stage.feeds.mover(),
        pad,
        declared,
        stage.feeds.bad_samples,
        shares,
    )
    if (
        isinstance(feed, StreamFeed)
        and isinstance(feed.stream, OwnStream)
        and declared != engine.ranks.data_size
    ):
        stage.run.say(
            f"Each rank reads a part of the training data of its own: for the {changes[0][1]}"
            f" microbatches of each of {declared} ranks a step takes {feed.microbatches_in(0)} of"
            f" each of {engine.ranks.data_size}, and of this epoch samples may be left out or come"
            " again."
        )
    stage.feeds.keep([feed])
    evaluation = stage.options.evaluation
    val_data = stage.data.find("val", stage.task)
    if val_data is not None and not has_step(stage.task, Task, "validation_step"):
        name = type(stage.task).__name__
        stage.run.say(
            f"There is validation data, and {name} has no validation_step: training runs without"
            " validation."
        )
        val_data = None
    val = stage.feeds.of_evaluation(val_data, "val_dataloaders", evaluation.limit_val_batches)
    stage.feeds.keep(val)
    for epoch, _ in changes:
        steps = feed.num_steps_in(epoch)
        interval = steps_between(evaluation.val_check_interval, steps)
        across = evaluation.check_val_every_n_epoch is None
        if val and interval and steps is not None and interval > steps and not across:
            raise ConfigError(
                f"trainer.val_check_interval is {interval}, but epoch {epoch} has {steps} steps:"
                " there would never be a validation in it. Use a smaller one, null for the epoch's"
                " end, or trainer.check_val_every_n_epoch=null to count steps across epochs."
            )
    stage.feeds.of_fit = Feeds(feed, val, val_data, training.batch_size, declared, changes, shares)
    stage.run.evaluator.data = _validation_data(stage)
    return stage.feeds.of_fit


def _validation_data(stage: Stage) -> ValidationData:
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
