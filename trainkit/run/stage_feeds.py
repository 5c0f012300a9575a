"""The feeds of a stage: those of evaluation are made here,
and all are closed when the stage ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.api.options import Limit
from trainkit.data.bad_samples import BadSamples
from trainkit.data.feed import Feed
from trainkit.device.transfer import Mover
from trainkit.optim.batch_plan import Accumulation
from trainkit.run.data_sources import DataSources
from trainkit.run.feed_maker import FeedMaker
from trainkit.run.run import Run
from trainkit.run.transfer_hooks import HookedMover, with_hooks


@dataclass(frozen=True)
class Feeds:
    """The feeds of a fit.

    Attributes:
        train: of training.
        val: of validation, one for each loader.
        val_data: the data that they were made of.
        batch_size: samples of one rank's microbatch; None if unknown.
        declared_ranks: the number of ranks that the settings are meant for.
        accumulation: (first epoch, microbatches of a rank in a step), ascending.
        shares: of each step's samples, for each rank; None for even ones.
    """

    train: Feed
    val: list[Feed]
    val_data: Any
    batch_size: int | None
    declared_ranks: int
    accumulation: Accumulation
    shares: Sequence[int] | None = None


class StageFeeds:
    """See the module.

    Attributes:
        of_fit: those of a fit, once they are made (feeds.py).
        declared_ranks: the number of ranks that limits are meant for, if it is not the number there
            is.
        bad_samples: those skipped; None if they raise (trainer.on_bad_sample).
    """

    of_fit: Feeds

    def __init__(self, run: Run, data: DataSources) -> None:
        self._run = run
        self._data = data
        self._feeds: list[Feed] = []
        self.declared_ranks: int | None = None
        self.bad_samples: BadSamples | None = None

    @property
    def maker(self) -> FeedMaker:
        """What makes this stage's feeds."""
        run = self._run
        return FeedMaker(run.engine, run.options.seed, self.declared_ranks, self.bad_samples)

    def mover(self) -> Mover | HookedMover:
        """Return what puts a batch on this rank's device."""
        run, device = self._run, self._run.engine.device
        mover = Mover(
            device, run.precision.input_dtype, run.options.numerics.uses_channels_last(device)
        )
        return with_hooks(mover, self._data, run.task, device)

    def of_evaluation(self, data: Any, name: str, limit: Limit) -> list[Feed]:
        """Return a feed for each loader of evaluation data; none for no data, or a limit of 0."""
        if data is None or limit == 0:
            return []
        return self.maker.for_evaluation(data, name, limit, self.mover().for_loader)

    def skip(self, bad: BadSamples) -> None:
        """Let all feeds that are made from here on leave out bad samples."""
        self.bad_samples = bad

    def keep(self, feeds: Iterable[Feed]) -> None:
        """Close these feeds when the stage ends."""
        self._feeds += feeds

    def drop(self, feeds: Iterable[Feed]) -> None:
        """Close these feeds now."""
        for feed in feeds:
            self._feeds.remove(feed)
            feed.close()

    def close(self) -> None:
        """Close all."""
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()
