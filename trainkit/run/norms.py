"""Batch norm over all ranks (trainer.sync_batchnorm), which needs samples on each rank in every step."""

from __future__ import annotations

import dataclasses

from trainkit.data.feed import MapFeed
from trainkit.engine.sync_batchnorm import check_even, release
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.run.feeds import Feeds
from trainkit.run.setup import Stage


def synchronise_norms(stage: Stage, feeds: Feeds, plan: BatchPlan) -> None:
    """Compute batch norm's statistics over all ranks (trainer.sync_batchnorm), if each has samples in every step."""
    if not stage.options.numerics.sync_batchnorm:
        return
    check_norms(stage, feeds, plan)
    if stage.feeds.bad_samples is not None:
        stage.feeds.bad_samples.needs_every_microbatch = True
    stage.engine.convert_sync_batchnorm(stage.task)
    stage.on_exit(release, stage.task)


def check_norms(stage: Stage, feeds: Feeds, plan: BatchPlan) -> None:
    """Check that batch norm can be computed over all ranks, if that is requested.

    Raises:
        ConfigError: a rank would have no samples in some step, or ranks could be without a microbatch.
    """
    engine, numerics = stage.engine, stage.options.numerics
    if not numerics.sync_batchnorm:
        return
    if numerics.halve_batch_on_oom and engine.ranks.world_size > 1:
        raise ConfigError(
            "trainer.sync_batchnorm and trainer.halve_batch_on_oom are both true: ranks that split a microbatch into more "
            "pieces than others would wait for them in batch norm. Leave one of the two out."
        )
    if engine.ranks.is_elastic and not engine.ranks.max_world_size:
        raise ConfigError(
            "trainer.sync_batchnorm is true in an elastic job without --max-np: one rank more than the samples of an epoch's "
            "last step would end it. Limit the number of ranks: --max-np N."
        )
    now, most = engine.ranks.world_size, engine.ranks.max_world_size
    for ranks in range(2 if engine.ranks.is_elastic else now, most + 1) if most > 1 else ():
        for epoch in (0, *(first for first, _ in plan.later)):
            _check_even(feeds, epoch, ranks, now)


def _check_even(feeds: Feeds, epoch: int, ranks: int, now: int) -> None:
    try:
        plan = feeds.train.plan_of(epoch) if isinstance(feeds.train, MapFeed) else None
        check_even(None if plan is None else dataclasses.replace(plan, world_size=ranks))
    except ConfigError as error:
        if ranks <= now:
            raise
        raise ConfigError(f"{error} Or keep this elastic job from growing so far: --max-np {ranks - 1}.") from None
