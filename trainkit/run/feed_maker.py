"""The feeds made of the user's data: map-style data, streams, evaluation data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from trainkit.api.options import Limit
from trainkit.data.bad_samples import BadSamples
from trainkit.data.combined import CombinedLoader
from trainkit.data.feed import Feed, MapFeed, Skips, StreamFeed
from trainkit.data.loader import ShardedLoader, Source, items_of, read_source
from trainkit.data.order import mix
from trainkit.data.plan import StepPlan
from trainkit.data.splitting import (
    fingerprint,
)
from trainkit.data.streams import (
    OwnStream,
    Sharded,
    SplitStream,
    Stream,
    StreamSource,
    has_indices,
)
from trainkit.device.transfer import Mover
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError, DataError
from trainkit.extension import find, resolve
from trainkit.optim.batch_plan import Accumulation, accumulation_at


@dataclass(frozen=True)
class FeedMaker:
    """Makes the feeds of a stage on one rank.

    Attributes:
        seed: of the order of samples, and of what data sets draw.
        declared_ranks: the number of ranks that limits and accumulation are meant for; None for the
            number there is.
        bad: the samples that are skipped; None if a bad sample raises.
    """

    engine: Engine
    seed: int
    declared_ranks: int | None = None
    bad: BadSamples | None = None

    @property
    def declared(self) -> int:
        """The number of ranks that limits and accumulation are meant for."""
        return self.declared_ranks or self.engine.ranks.data_size

    def for_training(
        self,
        data: Any,
        source: Source | None,
        changes: Accumulation,
        limit: Limit,
        move: Callable[[Any], Any],
        pad: bool = False,
        shares: Sequence[int] | None = None,
    ) -> Feed:
        """Return the feed of training data.

        Args:
            source: the data set of `data`; None for a stream.
            changes: microbatches of a rank in a step, by epoch.
            move: puts a batch on this rank's device.
            pad: fill the last step with the epoch's first samples.
            shares: of a step's samples, for each rank; None for even ones.

        Raises:
            ConfigError: a limit leaves nothing, shares do not fit the ranks or the data, or `pad`
                is set and the last step is dropped or unknown.
            DataError: there are fewer samples than ranks.
        """
        if limit is not None and limit == 0:
            raise ConfigError(
                f"trainer.limit_train_batches is {limit}; it must be above 0, or null for all."
            )
        if pad and (source is None or source.drop_last):
            why = (
                "the last step of a stream is unknown in advance"
                if source is None
                else "drop_last=True leaves out the last step"
            )
            raise ConfigError(
                f"trainer.pad_last_step is true, but {why}. Leave one of the two out."
            )
        if shares is not None:
            self._check_shares(shares, source)
        accumulate_at = functools.partial(accumulation_at, changes)
        skips = self._skips("train_dataloaders", each_step=True)
        if source is None:
            return self._stream_feed(data, "train_dataloaders", limit, accumulate_at, move, skips)
        plan = self._plan_training(source, changes, limit, pad, shares)
        sampler = getattr(data, "sampler", None)
        if source.shuffle and source.sampler is None and getattr(sampler, "generator", None):
            self.engine.ranks.say(
                "train_dataloaders: the order is not drawn from the loader's generator, but from"
                f" seed={self.seed} and the epoch, so that it resumes."
            )
        return MapFeed(
            self._sharded(source, plan),
            self.engine.ranks.data_rank,
            move,
            accumulate_at,
            skips,
            self.engine.comm.waits_for_device and _may_fetch_early(source, move) and skips is None,
        )

    def for_evaluation(
        self, data: Any, name: str, limit: Limit, mover_of: Callable[[int], Callable[[Any], Any]]
    ) -> list[Feed]:
        """Return a feed for each loader of evaluation data:
        a single one, or a list, tuple or dict of loaders. See `for_training`.

        Args:
            mover_of: returns what moves the batches of the loader with this number to the device.
        """
        if isinstance(data, CombinedLoader):
            data = data.iterables if data.mode == "sequential" else data.joined(name)
        named = isinstance(data, Mapping)
        several = items_of(data, DataLoader)
        feeds = [
            self._evaluation_feed(item, name, limit, mover_of(index))
            for index, item in enumerate(several or [data])
        ]
        for feed, loader_name in zip(feeds, data if named and several else (), strict=False):
            feed.name = str(loader_name)
        return feeds

    def _skips(self, name: str, each_step: bool) -> Skips | None:
        return None if self.bad is None else Skips(self.bad, name, each_step=each_step)

    def _evaluation_feed(
        self, data: Any, name: str, limit: Limit, move: Callable[[Any], Any]
    ) -> Feed:
        source = read_source(data, name, training=False)
        skips = self._skips(name, each_step=False)
        if source is None:
            return self._stream_feed(data, name, limit, lambda epoch: 1, move, skips)
        # predictions come in the data set's order
        unused = ["shuffle=True"] * (source.shuffle and source.sampler is None)
        unused += ["drop_last=True"] * source.drop_last
        ranks = self.engine.ranks
        if unused:
            ranks.say(
                f"{name}: {' and '.join(unused)} without effect: an evaluation takes each sample"
                " once, in the data set's order."
            )
        source = dataclasses.replace(source, shuffle=False)
        samples = _limited(source, limit, self.declared)
        even = self.engine.needs_even_rounds
        plan = StepPlan(samples, source.batch_size, ranks.data_size, even=even)
        return MapFeed(self._sharded(source, plan), ranks.data_rank, move, skips=skips)

    def _plan_training(
        self,
        source: Source,
        changes: Accumulation,
        limit: Limit,
        pad: bool,
        shares: Sequence[int] | None,
    ) -> StepPlan:
        """Return the plan of steps of a data set's samples.

        Raises:
            DataError: there are fewer samples than ranks, or drop_last leaves no step.
        """
        if source.num_samples < self.declared:
            raise DataError(
                f"The training data has {source.num_samples} samples for {self.declared} ranks;"
                " each rank needs one at least. Start fewer ranks."
            )
        samples = _limited(source, limit, self.declared)
        limited_to_full = isinstance(limit, int) and samples < source.num_samples
        uneven = tuple(shares) if shares is not None and len(set(shares)) > 1 else None
        plan = StepPlan(
            samples,
            source.batch_size,
            self.engine.ranks.data_size,
            max(n for _, n in changes),
            source.drop_last and not limited_to_full,
            pad,
            self.declared,
            self.engine.needs_even_rounds,
            uneven,
        )
        if plan.num_steps == 0:
            raise DataError(
                f"drop_last=True leaves nothing: the training data has {plan.num_samples} samples,"
                f" a step takes {plan.global_batch_size}. Use a smaller batch or drop_last=False."
            )
        return plan

    def _check_shares(self, shares: Sequence[int], source: Source | None) -> None:
        ranks = self.engine.ranks
        if source is None:
            raise ConfigError(
                f"trainer.rank_shares is {list(shares)}, but the training data is a stream, whose"
                " batches each rank reads as they come. Use a dataset with a length, or leave it"
                " out."
            )
        if len(shares) != ranks.data_size:
            what = "ranks" if ranks.model_size == 1 else "groups of ranks with a model"
            raise ConfigError(
                f"trainer.rank_shares is {list(shares)}, and there are {ranks.data_size} {what};"
                " it must have a number for each."
            )

    def _sharded(self, source: Source, plan: StepPlan) -> ShardedLoader:
        broadcast = self.engine.comm.broadcast_object
        rank = self.engine.ranks.data_rank
        return ShardedLoader(source, plan, rank, self.seed, broadcast, self.bad is not None)

    def _stream_feed(
        self,
        data: Any,
        name: str,
        limit: Limit,
        accumulate_at: Callable[[int], int],
        move: Callable[[Any], Any],
        skips: Skips | None,
    ) -> StreamFeed:
        engine = self.engine
        stream = self._stream(data, name, limit)
        sum_over_ranks, even = engine.data.sum_number, engine.needs_even_rounds
        return StreamFeed(stream, accumulate_at, sum_over_ranks, move, skips, even)

    def _stream(self, data: Any, name: str, limit: Limit) -> Stream:
        """Return a stream as this rank reads it.

        Raises:
            ConfigError: the limit is a share of an unknown length, or the ranks read different streams that are not
                declared as sharded; or bad samples are skipped, and the stream cannot be read on
                after one.
        """
        comm, ranks = self.engine.comm, self.engine.ranks
        self._check_stream(data, name)
        rank = ranks.data_rank
        world_size = ranks.data_size
        if isinstance(data, StreamSource):
            place = (rank, world_size)
            count = _count_of(limit, None, 1)
            return data.stream(count, self.seed, place, self.declared, comm.run_on_main)
        if reader := reader_of(data):
            data = resolve(reader)(data, name, self.engine)
        reads_own = isinstance(data, Sharded)
        data = data.data if reads_own else data
        # schedules count the same steps on all ranks
        lengths = comm.all_gather_object(_length_of(data))
        length = None if None in lengths else max(lengths)
        if reads_own:
            declared, count = self.declared / world_size, _count_of(limit, length, 1)
            return OwnStream(data, length, count, mix(self.seed, rank), declared)
        own = fingerprint(data, self.seed) if ranks.world_size > 1 else None
        if len(set(comm.all_gather_object(own))) > 1:
            raise ConfigError(
                f"{name}: the ranks read different streams (their first batches differ), so the"
                " batches of one stream cannot be split over them. If each rank reads a part of its"
                " own, declare it: trainkit.sharded(...). If the stream shuffles, give it a fixed"
                " seed, so that all ranks read the same order."
            )
        return SplitStream(
            data,
            length,
            _count_of(limit, length, self.declared),
            self.seed,
            (rank, world_size),
            self.declared,
            comm.broadcast_object,
            self.bad is not None,
        )

    def _check_stream(self, data: Any, name: str) -> None:
        ranks = self.engine.ranks
        if self.bad is not None and not has_indices(data) and not isinstance(data, (list, tuple)):
            kind = type(getattr(data, "dataset", data)).__name__
            raise ConfigError(
                f"on_bad_sample is 'skip', but {name} is a stream ({kind}), which cannot be read on"
                " after an error. Catch the error in its own iteration, and set on_bad_sample=raise."
            )
        if ranks.model_size > 1 and isinstance(data, (Sharded, StreamSource)):
            kind = "trainkit.sharded(...)" if isinstance(data, Sharded) else data.kind
            raise ConfigError(
                f"{name} is {kind}, and the ranks are {ranks.groups}: each rank would read other"
                " samples, and ranks that compute one model must read the same. Pass a"
                " DataLoader or an iterable: its batches are split over the data ranks."
            )


def _may_fetch_early(source: Source, move: Callable[[Any], Any]) -> bool:
    """Whether a batch can be loaded and moved before its step with the same result: a data set in
    this process, or a hook of the user's, may draw random numbers.
    """
    return source.options.get("num_workers", 0) > 0 and type(move) is Mover


def reader_of(data: Any) -> Any:
    """Return who reads a data set that takes its part by itself, a dotted name; None for others."""
    whole = data.data if isinstance(data, Sharded) else data
    dataset = whole.dataset if isinstance(whole, DataLoader) else whole
    return find("data_sets", type(dataset).__module__.partition(".")[0], {})


def _length_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:  # a DataLoader has __len__, and its iterable data set may have none
        return None


def _count_of(limit: Limit, length: int | None, ranks: int) -> int | None:
    """Return a limit as a count of batches of each rank, of a stream of `length` batches.

    Raises:
        ConfigError: it is a share, of a length that is unknown, or that leaves no batch.
    """
    if not isinstance(limit, float):
        return limit
    if length is None:
        raise ConfigError(
            f"A limit of {limit} is a share, but the data is a stream without length. Give a"
            " number of batches."
        )
    count = int(length * limit / ranks)
    if count == 0:
        raise ConfigError(
            f"A limit of {limit:g} of {length} batches leaves none to a rank"
            " (trainer.limit_*_batches, or overfit_batches). Give a larger share, or a count of"
            " batches."
        )
    return count


def _limited(source: Source, limit: Limit, world_size: int) -> int:
    """Return the number of samples under a limit:
    a count of microbatches of each rank, or a share of the data.

    Raises:
        ConfigError: it is a share that leaves no sample.
    """
    if limit is None:
        return source.num_samples
    if isinstance(limit, float):
        if 0 < source.num_samples * limit < 1:
            raise ConfigError(
                f"A limit of {limit:g} of {source.num_samples} samples leaves none (trainer.limit_*_batches,"
                " or overfit_batches). Give a larger share, or a count of batches."
            )
        return int(source.num_samples * limit)
    return min(source.num_samples, limit * source.batch_size * world_size)
