"""Batch norm over all ranks (trainer.sync_batchnorm),
which needs samples on each rank in every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from trainkit.api.view import RunView
from trainkit.data.feed import Feed, MapFeed
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.extensions.sync_batchnorm.layer import (
    SyncBatchNorm,
    check_even,
    release,
    synchronise,
)
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage


def of_stage(stage: Stage) -> SyncNorms | None:
    """Return the feature if it is asked for."""
    return SyncNorms(stage.enter) if stage.options.numerics.sync_batchnorm else None


class SyncNorms(Feature):
    """See the module.

    Args:
        enter: enters a context until the stage ends.
    """

    name = "trainer.sync_batchnorm"
    not_split = (
        "trainer.sync_batchnorm is true: a rank without samples runs its forward on borrowed ones,"
        " which would count in the statistics. Use a norm that needs no batch (LayerNorm,"
        " GroupNorm), or engine=ddp."
    )

    def __init__(self, enter: Callable[[contextlib.AbstractContextManager[None]], None]) -> None:
        self._enter = enter

    def data_read(self, run: RunView) -> None:
        """Check that each rank has samples in every step.

        Raises:
            ConfigError: a rank would have no samples in some step, or ranks could be without a
                microbatch.
        """
        engine = run.engine
        if run.options.numerics.halve_batch_on_oom and engine.ranks.world_size > 1:
            raise ConfigError(
                "trainer.sync_batchnorm and trainer.halve_batch_on_oom are both true: ranks that"
                " split a microbatch into more pieces than others would wait for them in batch"
                " norm. Leave one of the two out."
            )
        if engine.ranks.is_elastic and not engine.ranks.max_world_size:
            raise ConfigError(
                "trainer.sync_batchnorm is true in an elastic job without --max-np: one rank more"
                " than the samples of an epoch's last step would end it. Limit the number of ranks:"
                " --max-np N."
            )
        now = engine.ranks.world_size
        most = engine.ranks.max_world_size
        for ranks in range(2 if engine.ranks.is_elastic else now, most + 1) if most > 1 else ():
            for epoch in (0, *(first for first, _ in run.batch_plan.later)):
                _check_even(run.train_feed, epoch, ranks, now)

    def before_optimizers(self, run: RunView) -> None:
        """Let the layers of batch norm take their statistics over all ranks."""
        self._enter(_synchronised(run.engine, run.task))
        has_norms = any(isinstance(module, SyncBatchNorm) for module in run.task.modules())
        if run.engine.ranks.world_size > 1 and not has_norms:
            run.say(
                f"trainer.sync_batchnorm is true, and {type(run.task).__name__} has no batch norm: it"
                " changes nothing."
            )


@contextlib.contextmanager
def _synchronised(engine: Engine, task: nn.Module) -> Iterator[None]:
    synchronise(task, engine.comm)
    try:
        yield
    finally:
        release(task)


def _check_even(feed: Feed, epoch: int, ranks: int, now: int) -> None:
    try:
        plan = feed.plan_of(epoch) if isinstance(feed, MapFeed) else None
        check_even(None if plan is None else dataclasses.replace(plan, world_size=ranks))
    except ConfigError as error:
        if ranks <= now:
            raise
        raise ConfigError(
            f"{error} Or keep this elastic job from growing so far: --max-np {ranks - 1}."
        ) from None
