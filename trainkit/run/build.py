"""build_run: from an entered stage to a run that the loop can train. `plan` and `replay` call it
too.

weights placed -> checkpoint found -> data found -> feeds, and the plan of batch and rate -> weights
loaded, split by the engine -> optimizers -> parts of the step -> restored -> rank 0's state to all
ranks

What depends on an option asks the features (feature.py): here are no branches for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from trainkit.api.alerts import alert
from trainkit.api.options import BatchOptions
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.data.feed import Feed, MapFeed
from trainkit.data.shares import format_shares
from trainkit.device.sync_guard import SyncGuard
from trainkit.errors import ConfigError
from trainkit.metrics.objects import EpochMetrics
from trainkit.optim.batch_plan import BatchPlan, derive_warmup
from trainkit.optim.forms import ScheduleConfig, read_optimizers
from trainkit.optim.fused import use_fused
from trainkit.optim.sample_weights import SampleWeights
from trainkit.optim.schedule import LearningRates
from trainkit.run.compile import uses_graphs
from trainkit.run.data_sources import read_training_data
from trainkit.run.evaluator import Evaluator
from trainkit.run.feature import Features
from trainkit.run.features import features_of
from trainkit.run.feeds import make_feeds
from trainkit.run.finite import LossWatch
from trainkit.run.first_weights import StartFrom as StartFrom
from trainkit.run.first_weights import (
    load_datamodule,
    load_to_evaluate,
    load_weights,
    place_weights,
    shard_weights,
)
from trainkit.run.parts import contents_of
from trainkit.run.placement import check_parameters
from trainkit.run.reload import epoch_of_loaders
from trainkit.run.replicas import optimizers_of
from trainkit.run.rescue import Rescue
from trainkit.run.resume import declared_ranks, find_saved, first_shares, restore
from trainkit.run.reused import Made
from trainkit.run.run import FitParts, Run
from trainkit.run.setup import Stage
from trainkit.run.split_weights import check_split, check_split_optimizers
from trainkit.run.stage_feeds import Feeds
from trainkit.run.step_parts import NOT_GUARDED, StepParts
from trainkit.run.step_settings import step_settings
from trainkit.run.stopping import Stopping


def build_run(stage: Stage, start: StartFrom) -> Run:
    """Return the stage's run with the parts of a fit, at the state of the checkpoint."""
    run = stage.run
    features = features_of(stage)
    features.model_made(run)
    place_weights(stage)
    saved = find_saved(stage, start.ckpt_path)
    run.train_on(*_data_of(stage, saved))
    features.data_read(run)
    load_weights(stage, start, saved)
    _check_engine(run, features)
    shard_weights(stage, start, saved)
    features.before_optimizers(run)
    optimizers, schedules = _optimizers(stage)
    run.begin(_parts(stage, features, optimizers, schedules))
    features.begun(run)
    run.checkpoints.connect(contents_of(run, features), Rescue(run))
    restore(run, saved)
    run.engine.prepare(run.task, optimizers, run.precision)
    stage.report()
    return run


def _data_of(stage: Stage, saved: dict[str, Any] | None) -> tuple[Feed, BatchPlan]:
    """Make the feeds of a fit; return that of training, and the plan of batch and rate."""
    stage.run.state.current_epoch = epoch_of_loaders(stage, saved)  # which hooks may ask
    load_datamodule(stage, saved)
    training = read_training_data(stage.data, stage.task, stage.engine, stage.replicas)
    stage.feeds.declared_ranks = declared_ranks(stage, saved)
    feeds = make_feeds(stage, training, first_shares(stage, saved))
    communication = stage.options.communication.describe()
    return feeds.train, plan_batches(stage.options.batch, feeds, communication)


def plan_batches(options: BatchOptions, feeds: Feeds, communication: str = "exact") -> BatchPlan:
    """Return the plan of batch and rate."""
    warmup = derive_warmup(
        options.lr_warmup_steps, options.lr_warmup_epochs, feeds.train.num_steps_in
    )
    (_, accumulate), *later = feeds.accumulation
    scaling = options.lr_scaling
    reference = options.lr_reference_batch_size
    size, ranks, shares = feeds.batch_size, feeds.declared_ranks, format_shares(feeds.shares)
    return BatchPlan(
        size, ranks, accumulate, scaling, reference, warmup, tuple(later), communication, shares
    )


def _check_engine(run: Run, features: Features) -> None:
    """Refuse what the engine cannot serve."""
    check_split(run.engine, run.task, features)
    run.engine.agree(step_settings(run, features))


def _optimizers(stage: Stage) -> Made:
    """Return the optimizers and schedules of a Task, whose gradients are cleared."""
    task, run, make = stage.task, stage.run, partial(_make_optimizers, stage.task)
    optimizers, schedules = (
        make() if stage.reused is None else stage.reused.optimizers(task, run.batch_plan, make)
    )
    check_parameters(task, optimizers)
    check_split_optimizers(stage.engine, optimizers)
    stage.replicas.compare("optimizers", lambda: _facts(optimizers, schedules, stage.feeds.of_fit))
    task.zero_grad(set_to_none=True)  # gradients of an interrupted run would count as this one's
    return optimizers, schedules


def _make_optimizers(task: Task) -> Made:
    own_step = task.lr_scheduler_step if has_step(task, Task, "lr_scheduler_step") else None
    optimizers, schedules = read_optimizers(
        task.configure_optimizers(), task.automatic_optimization, own_step
    )
    use_fused(optimizers)
    return optimizers, schedules


def _facts(
    optimizers: Sequence[Optimizer], schedules: Sequence[ScheduleConfig], feeds: Feeds
) -> dict[str, str]:
    counts = [
        feed.plan_of(0).num_samples if isinstance(feed, MapFeed) else None for feed in feeds.val
    ]
    lengths = {f"samples of validation loader {i}": str(count) for i, count in enumerate(counts)}
    return optimizers_of(optimizers, schedules) | lengths


def _parts(
    stage: Stage,
    features: Features,
    optimizers: Sequence[Optimizer],
    schedules: Sequence[ScheduleConfig],
) -> FitParts:
    run = stage.run
    engine = stage.engine
    own_weight = None if type(run.task).batch_weight is Task.batch_weight else run.task.batch_weight
    weights = SampleWeights(
        type(run.task).__name__,
        engine.device,
        engine.data.all_reduce,
        own_weight,
        lambda: engine.approximation.steps_alone,
        engine.ranks.data_size,
        engine.needs_even_rounds,
    )
    step = StepParts(
        weights,
        EpochMetrics(run.task),
        LossWatch(
            partial(alert, run, "non-finite"),
            run.state,
            engine.ranks,
            lambda: engine.approximation.steps_alone,
            copies=uses_graphs(stage.options.numerics.compile),
        ),
        sync_guard=(
            SyncGuard(engine.device) if run.options.numerics.assert_no_sync else NOT_GUARDED
        ),
        **{
            "update": engine.step,
            "clears_late": run.hooks.has("on_before_zero_grad"),
            **features.in_step(run, optimizers),
        },
    )
    rates = LearningRates(
        optimizers, schedules, run.batch_plan, run.options.batch.lr_momentum_correction, run.say
    )
    stopping = Stopping(run, stage.signals, run.coordinator, run.elastic)
    return FitParts(optimizers, rates, step, stopping, features.before_epoch)


def build_evaluator(stage: Stage, ckpt_path: str | None) -> tuple[Evaluator, list[Feed]]:
    """Return an evaluator with the checkpoint's weights in the task, and the feeds of the stage's
    data.

    Raises:
        ConfigError: there is no such data.
        CheckpointError: there is no such checkpoint.
    """
    features_of(stage).model_made(stage.run)
    load_to_evaluate(stage, ckpt_path)
    kind = "val" if stage.kind == "validate" else stage.kind
    limit = getattr(stage.options.evaluation, f"limit_{kind}_batches")
    feeds = stage.feeds.of_evaluation(
        stage.data.find(kind, stage.task), f"{kind}_dataloaders", limit
    )
    if not feeds and limit == 0:
        raise ConfigError(
            f"trainer.limit_{kind}_batches is 0, and leaves nothing to {stage.kind} on; it must be"
            " above 0, or null for all."
        )
    if not feeds:
        raise ConfigError(
            f"There is no data to {stage.kind} on: pass dataloaders, or define {kind}_dataloader()."
        )
    stage.feeds.keep(feeds)
    stage.engine.prepare(stage.task, [])
    return stage.run.evaluator, feeds
