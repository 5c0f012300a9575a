"""Which samples of the data set a step of this rank took; from arithmetic, so that it can be asked for afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.data.feed import MapFeed, Microbatch

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


def samples_of(trainer: Trainer, epoch: int, step_in_epoch: int) -> list[list[int]] | None:
    """Return the data set's indices of each microbatch of a step on this rank; None for a stream, which has none."""
    feed = trainer.session.run.feed
    if not isinstance(feed, MapFeed):
        return None
    shares = feed.plan_of(epoch).microbatches(step_in_epoch, trainer.global_rank)
    return [feed.indices(epoch, Microbatch(None, len(places), False, places)) or [] for places in shares]


def step_size_of(trainer: Trainer, epoch: int, step_in_epoch: int) -> int | None:
    """Return the samples of a step on all ranks; None for a stream."""
    feed = trainer.session.run.feed
    return feed.plan_of(epoch).samples_in(step_in_epoch) if isinstance(feed, MapFeed) else None
