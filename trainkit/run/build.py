"""build_run: from an entered stage to a run that the loop can train. `plan` and `replay` call it too.

weights placed -> checkpoint found -> feeds -> plan of batch and rate -> begun, if there is no checkpoint -> engine.shard ->
optimizers -> parts of the step -> restored -> rank 0's state to all ranks
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from trainkit.api.alerts import alert
from trainkit.api.datamodule import DataModule
from trainkit.api.from_checkpoint import plain
from trainkit.api.manual import connect
from trainkit.api.options import BatchOptions, NumericOptions
from trainkit.api.task import Task
from trainkit.api.view import checkpoint_policies
from trainkit.checkpoint.contents import OWN, Contents, Part
from trainkit.checkpoint.stateful import versions
from trainkit.console import try_to_write
from trainkit.data.feed import Feed, MapFeed
from trainkit.data.order import mix
from trainkit.data.seeding import seed_everything
from trainkit.data.shares import words_of
from trainkit.device.sync_guard import SyncGuard
from trainkit.engine.approximate.approximation import OwnPart, SharedPart
from trainkit.errors import CheckpointError, ConfigError
from trainkit.metrics.objects import EpochMetrics
from trainkit.optim.batch_plan import BatchPlan, derive_warmup
from trainkit.optim.forms import ScheduleConfig, read_optimizers
from trainkit.optim.fused import use_fused
from trainkit.optim.sample_weights import SampleWeights
from trainkit.optim.schedule import LearningRates
from trainkit.run.data_sources import read_training_data
from trainkit.run.evaluator import Evaluator
from trainkit.run.feeds import Feeds, make_feeds, validation_data
from trainkit.run.finite import FiniteLosses, LossWatch
from trainkit.run.folder import set_aside
from trainkit.run.manual import ManualRun
from trainkit.run.model import fill_parts, is_in_parts, load_whole
from trainkit.run.norms import synchronise_norms
from trainkit.run.oom import Halving
from trainkit.run.parts import CallbacksPart, LogPart, OptimizersPart, PlanPart, RandomPart, RatesPart, ScalerPart, ValuesPart
from trainkit.run.placement import check_parameters, place
from trainkit.run.reload import Reload
from trainkit.run.replicas import model_of, optimizers_of
from trainkit.run.rescue import Rescue
from trainkit.run.resume import declared_ranks, find_saved, first_shares, restore
from trainkit.run.run import FitParts, Run
from trainkit.run.setup import Stage
from trainkit.run.split_weights import check_split
from trainkit.run.step_parts import StepParts
from trainkit.run.step_settings import step_settings
from trainkit.run.stopping import Stopping
from trainkit.safety.masking import masked


@dataclass(frozen=True)
class StartFrom:
    """The start of a fit; see Trainer.fit."""

    ckpt_path: str | None = None
    init_weights: str | None = None
    strict: bool = True


def build_run(stage: Stage, start: StartFrom) -> Run:
    """Add the parts of a fit to the stage's run, at the state of the checkpoint, and return the run."""
    run, task, engine, options = stage.run, stage.task, stage.engine, stage.options
    data = read_training_data(stage.data, task, engine, stage.replicas)
    _tidy(stage)
    place(task, engine, run.precision, options.numerics.uses_channels_last(engine.device))  # first: loading casts
    stage.replicas.compare("model", lambda: model_of(task))
    in_parts = is_in_parts(task)
    saved = find_saved(stage, start.ckpt_path)
    stage.feeds.declared_ranks = declared_ranks(stage, saved)
    feeds = make_feeds(stage, data, stage.feeds.declared_ranks, first_shares(stage, saved))
    run.train_on(feeds.train, plan_batches(options.batch, feeds, options.communication.describe()))
    synchronise_norms(stage, feeds, run.batch_plan)
    if saved is None:
        _begin(run)
        if not in_parts:
            _load_weights(stage, start, in_parts)
    check_split(stage)
    engine.agree(step_settings(run))
    engine.shard(task)
    if run.checkpoints.opened is not None:
        run.checkpoints.opened.fill_weights(task)
        task._first_weights = None  # they are replaced
    elif in_parts and saved is None:
        _load_weights(stage, start, in_parts)
    make = partial(_optimizers, task)
    optimizers, schedules = make() if stage.kept is None else stage.kept.optimizers(task, run.batch_plan, make)
    check_parameters(task, optimizers)
    stage.replicas.compare("optimizers", lambda: _facts(optimizers, schedules, feeds))
    task.zero_grad(set_to_none=True)  # gradients of an interrupted run would count as this one's
    manual = None if task.automatic_optimization else ManualRun(run, optimizers)
    connect(task, manual)
    rates = LearningRates(optimizers, schedules, run.batch_plan, options.batch.lr_momentum_correction, run.say)
    rates.moves_by_hand = manual is not None
    stopping = Stopping(run, stage.signals, run.coordinator, run.elastic)
    before_epoch = [Reload(stage, run, feeds)] if options.samples.reload_dataloaders_every_n_epochs else []
    run.begin(FitParts(optimizers, rates, _step_parts(run, options.numerics, manual), stopping, before_epoch))
    run.evaluator.data = validation_data(stage, feeds.val, feeds.val_data)
    run.checkpoints.connect(_contents(run), Rescue(run))
    if run.elastic is not None:
        run.elastic.attach(run)
    seed_everything(mix(options.seed, engine.ranks.data_rank))
    if saved is not None:
        restore(run, saved)
    engine.prepare(task, optimizers, run.precision)
    return run


def _optimizers(task: Task) -> tuple[list[torch.optim.Optimizer], list[ScheduleConfig]]:
    optimizers, schedules = read_optimizers(task.configure_optimizers(), task.automatic_optimization)
    use_fused(optimizers)
    return optimizers, schedules


def _facts(optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[ScheduleConfig], feeds: Feeds) -> dict[str, str]:
    counts = [feed.plan_of(0).num_samples if isinstance(feed, MapFeed) else None for feed in feeds.val]
    lengths = {f"samples of validation loader {i}": str(count) for i, count in enumerate(counts)}
    return optimizers_of(optimizers, schedules) | lengths


def plan_batches(options: BatchOptions, feeds: Feeds, communication: str = "exact") -> BatchPlan:
    """Return the plan of batch and rate."""
    warmup = derive_warmup(options.lr_warmup_steps, options.lr_warmup_epochs, feeds.train.num_steps_in)
    (_, accumulate), *later = feeds.accumulation
    scaling, reference = options.lr_scaling, options.lr_reference_batch_size
    size, ranks, shares = feeds.batch_size, feeds.declared_ranks, words_of(feeds.shares)
    return BatchPlan(size, ranks, accumulate, scaling, reference, warmup, tuple(later), communication, shares)


def build_evaluator(
    stage: Stage, kind: Literal["val", "test", "predict"], ckpt_path: str | None
) -> tuple[Evaluator, list[Feed]]:
    """Return an evaluator with the checkpoint's weights in the task, and the feeds of the data of a kind.

    Raises:
        ConfigError: there is no such data.
        CheckpointError: there is no such checkpoint.
    """
    run, task, engine, limits = stage.run, stage.task, stage.engine, stage.options.evaluation
    feeds = stage.feeds.of_evaluation(
        stage.data.find(kind, task), f"{kind}_dataloaders", getattr(limits, f"limit_{kind}_batches")
    )
    if not feeds:
        raise ConfigError(f"There is no data to {stage.kind} on: pass dataloaders, or define {kind}_dataloader().")
    stage.feeds.keep(feeds)
    place(task, engine, run.precision, stage.options.numerics.uses_channels_last(engine.device))  # first: loading casts
    is_file = ckpt_path is not None and Path(ckpt_path).is_file()
    in_parts, opens = is_in_parts(task), engine.splits_weights and not is_file
    if ckpt_path is not None and not in_parts and not opens:
        run.checkpoints.resumed_from = engine.comm.run_on_main(lambda: _read_weights(stage, ckpt_path))
    engine.shard(task)
    if ckpt_path is not None and opens:
        run.checkpoints.open(ckpt_path, resume=False)
    if run.checkpoints.opened is not None:
        run.checkpoints.opened.fill_weights(task)
        task._first_weights = None  # they are replaced
        run.checkpoints.opened.close()
    elif in_parts:
        fill_parts(task, engine, ckpt_path)
        run.checkpoints.resumed_from = ckpt_path or run.checkpoints.resumed_from
    engine.prepare(task, [])
    return run.evaluator, feeds


def _read_weights(stage: Stage, ckpt_path: str) -> str:
    """Rank 0: load the weights of a trainkit checkpoint, or of a file of weights; return its path."""
    if Path(ckpt_path).is_file():
        load_whole(stage.task, ckpt_path)
        return ckpt_path
    found = stage.checkpoints.read(ckpt_path, stage.task, resume=False)
    if found is None:
        raise CheckpointError(f"ckpt_path is '{ckpt_path}', and there is no checkpoint in {stage.checkpoints.stores[0].place}.")
    return found[0]


def _tidy(stage: Stage) -> None:
    """Remove drafts of checkpoints that a killed run left, unless one is being written by an attempt of this process."""
    if stage.engine.ranks.is_main and not stage.checkpoints.is_writing:
        for store in stage.checkpoints.stores:
            try_to_write(store.tidy, f"{store.place} could not be tidied")


def _step_parts(run: Run, numerics: NumericOptions, manual: ManualRun | None) -> StepParts:
    if numerics.assert_no_sync and numerics.compile and run.engine.device.type == "cpu":
        raise ConfigError(
            "trainer.assert_no_sync and trainer.compile are both set: on the CPU the guard's interception of calls "
            "prevents torch.compile from compiling. Check without compile."
        )
    engine = run.engine
    own_weight = None if type(run.task).batch_weight is Task.batch_weight else run.task.batch_weight
    return StepParts(
        SampleWeights(
            type(run.task).__name__,
            engine.device,
            engine.data.all_reduce,
            own_weight,
            lambda: engine.approximation.steps_alone,
            engine.ranks.data_size,
            engine.needs_even_rounds,
        ),
        EpochMetrics(run.task),
        LossWatch(partial(alert, run, "non-finite"), run.state, run.engine.ranks, lambda: run.engine.approximation.steps_alone),
        clears_late=run.hooks.has("on_before_zero_grad"),
        sync_guard=SyncGuard(engine.device) if numerics.assert_no_sync else contextlib.nullcontext(),
        finite=FiniteLosses(run) if numerics.stop_on_nonfinite else None,
        halving=Halving(engine, run.state, run.say) if numerics.halve_batch_on_oom else None,
        manual=manual,
    )


def _contents(run: Run) -> Contents:
    @contextlib.contextmanager
    def saving() -> Any:
        extra: dict[str, Any] = {}
        try:
            run.hooks("on_save_checkpoint", extra)
            yield extra
        finally:
            run.hooks("on_save_checkpoint_end")

    def about() -> dict[str, Any]:
        found: dict[str, Any] = {"epoch": run.current_epoch, "global_step": run.global_step}
        found |= {"metrics": dict(run.callback_metrics), "contract": run.batch_plan.to_dict()}
        if hparams := plain(run.task.hparams):
            found["hparams"] = masked(hparams, run.options.masked_values)
        return found | {"versions": versions(), "config": run.options.config}

    data = run.datamodule
    of_data: dict[str, Part] = {}
    if data is not None and type(data).state_dict is not DataModule.state_dict:
        of_data["datamodule"] = data
    return Contents(
        task=run.task,
        parts={
            **of_data,
            "state": run.state,
            "callbacks": CallbacksPart(run.callbacks),  # first: one may add groups to an optimizer
            "optimizers": OptimizersPart(run.engine, run.optimizers),
            "rates": RatesPart(run.rates, run.state),
            "scaler": ScalerPart(run.precision),
            "values": ValuesPart(run.callback_metrics),
            "validations": run.evaluator,
            "contract": PlanPart(lambda: run.batch_plan),
            "communication": SharedPart(run.engine.approximation),
        },
        rank_parts={
            "metrics": LogPart(run.task, run.step, run.engine),
            "random": RandomPart(run.engine),
            OWN: OwnPart(run.engine.approximation, run.engine.comm),
        },
        about=about,
        saving=saving,
    )


def _begin(run: Run) -> None:
    run.engine.comm.run_on_main(lambda: _refuse_foreign(run))
    if run.is_global_zero:
        set_aside(run.run_dir)


def _refuse_foreign(run: Run) -> None:
    """Refuse a new run in another run's checkpoint folder: it would replace and delete those checkpoints."""
    for policy in checkpoint_policies(run.callbacks):
        if policy.dirpath and (there := policy.store_of(run.run_dir).names()):
            shown = f"{', '.join(there[:3])}{', ...' * (len(there) > 3)}"
            raise ConfigError(
                f"ModelCheckpoint.dirpath is '{policy.dirpath}', which holds checkpoints of another run ({shown}). "
                "Resume from them (ckpt_path=last, or resume=auto), or give another folder."
            )


def _load_weights(stage: Stage, start: StartFrom, in_parts: bool) -> None:
    """Fill a new run's weights: those of this rank's parts, or whole ones on rank 0, which sends them later."""
    task, engine, weights = stage.task, stage.engine, start.init_weights
    left: list[str] = []
    if in_parts:
        left = fill_parts(task, engine, weights, start.strict)
    elif weights is not None:
        left = engine.comm.run_on_main(lambda: load_whole(task, weights, start.strict))
    if weights is not None:
        misfits = ", without those that do not match:\n  " + "\n  ".join(left) if left else ""
        stage.run.say(f"Weights from {weights}{misfits}.")
