"""The feeds made of the user's data: map-style data, streams, evaluation data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainkit.api.options import Limit
from trainkit.data.bad_samples import BadSamples
from trainkit.data.combined import CombinedLoader
from trainkit.data.feed import Feed, MapFeed, Skips, StreamFeed
from trainkit.data.loader import ShardedLoader, Source, items_of, read_source
from trainkit.data.order import mix
from trainkit.data.plan import StepPlan
from trainkit.data.splitting import fingerprint, split_over_ranks, splits_itself
from trainkit.data.streams import (
    OwnStream,
    Sharded,
    SplitStream,
    Stream,
    StreamSource,
    iterates_itself,
)
from trainkit.device.transfer import Mover
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError, DataError
from trainkit.optim.batch_plan import Accumulation, accumulation_at


def train_feed(
    data: Any,
    source: Source | None,
    changes: Accumulation,
    limit: Limit,
    seed: int,
    engine: Engine,
    move: Callable[[Any], Any],
    pad: bool = False,
    declared_ranks: int | None = None,
    bad: BadSamples | None = None,
    shares: Sequence[int] | None = None,
) -> Feed:
    """Return the feed of training data.

    Args:
        changes: microbatches of a rank in a step, by epoch.
        declared_ranks: the number of ranks that `changes` and `limit` are meant for. Default: the
            current number.
        bad: the samples that are skipped; None if a bad sample raises.
        shares: of a step's samples, for each rank; None for even ones.

    Raises:
        ConfigError: a limit leaves nothing, shares do not fit the ranks or the data, or `pad` is
            set and the last step is dropped or unknown.
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
        raise ConfigError(f"trainer.pad_last_step is true, but {why}. Leave one of the two out.")
    if shares is not None:
        _check_shares(shares, source, engine)
    accumulate_at = functools.partial(accumulation_at, changes)
    declared = declared_ranks or engine.ranks.data_size
    skips = None if bad is None else Skips(bad, "train_dataloaders", each_step=True)
    if source is None:
        stream = _stream(data, "train_dataloaders", limit, seed, engine, declared, bad is not None)
        return StreamFeed(
            stream, accumulate_at, engine.data.sum_number, move, skips, engine.needs_even_rounds
        )
    if source.num_samples < declared:
        raise DataError(
            f"The training data has {source.num_samples} samples for {declared} ranks; each rank"
            " needs one at least. Start fewer ranks."
        )
    sampler = getattr(data, "sampler", None)
    if source.shuffle and source.sampler is None and getattr(sampler, "generator", None):
        engine.ranks.say(
            "train_dataloaders: the order is not drawn from the loader's generator, but from"
            f" seed={seed} and the epoch, so that it resumes."
        )
    samples = _limited(source, limit, declared)
    # full microbatches anyway
    drop_last = source.drop_last and not (isinstance(limit, int) and samples < source.num_samples)
    most = max(n for _, n in changes)
    even = engine.needs_even_rounds
    uneven = tuple(shares) if shares is not None and len(set(shares)) > 1 else None
    ranks = engine.ranks.data_size
    plan = StepPlan(samples, source.batch_size, ranks, most, drop_last, pad, declared, even, uneven)
    if plan.num_steps == 0:
        raise DataError(
            f"drop_last=True leaves nothing: the training data has {plan.num_samples} samples, a"
            f" step takes {plan.global_batch_size}. Use a smaller batch or drop_last=False."
        )
    return MapFeed(
        _sharded(source, plan, seed, engine, bad is not None),
        engine.ranks.data_rank,
        move,
        accumulate_at,
        skips,
        engine.comm.waits_for_device and _may_fetch_early(source, move) and skips is None,
    )


def _may_fetch_early(source: Source, move: Callable[[Any], Any]) -> bool:
    """Whether a batch can be loaded and moved before its step with the same result: a data set in
    this process, or a hook of the user's, may draw random numbers.
    """
    return source.options.get("num_workers", 0) > 0 and type(move) is Mover


def _check_shares(shares: Sequence[int], source: Source | None, engine: Engine) -> None:
    if source is None:
        raise ConfigError(
            f"trainer.rank_shares is {list(shares)}, but the training data is a stream, whose"
            " batches each rank reads as they come. Use a dataset with a length, or leave it out."
        )
    if len(shares) != engine.ranks.data_size:
        what = "ranks" if engine.ranks.model_size == 1 else "groups of ranks with a model"
        raise ConfigError(
            f"trainer.rank_shares is {list(shares)}, and there are {engine.ranks.data_size} {what};"
            " it must have a number for each."
        )


def eval_feeds(
    data: Any,
    name: str,
    limit: Limit,
    seed: int,
    engine: Engine,
    mover_of: Callable[[int], Callable[[Any], Any]],
    declared_ranks: int | None = None,
    bad: BadSamples | None = None,
) -> list[Feed]:
    """Return a feed for each loader of evaluation data:
    a single one, or a list, tuple or dict of loaders. See `train_feed`.

    Args:
        mover_of: returns what moves the batches of the loader with this number to the device.
    """
    if isinstance(data, CombinedLoader):
        data = data.iterables if data.mode == "sequential" else data.joined(name)
    named = isinstance(data, Mapping)
    several = items_of(data, DataLoader)
    feeds: list[Feed] = []
    for index, item in enumerate(several or [data]):
        move = mover_of(index)
        source = read_source(item, name, training=False)
        skips = None if bad is None else Skips(bad, name, each_step=False)
        if source is None:
            declared = declared_ranks or engine.ranks.data_size
            stream = _stream(item, name, limit, seed, engine, declared, bad is not None)
            sum_over_ranks, even = engine.data.sum_number, engine.needs_even_rounds
            feeds.append(StreamFeed(stream, lambda epoch: 1, sum_over_ranks, move, skips, even))
        else:
            # predictions come in the data set's order
            unused = ["shuffle=True"] * (source.shuffle and source.sampler is None)
            unused += ["drop_last=True"] * source.drop_last
            if unused:
                engine.ranks.say(
                    f"{name}: {' and '.join(unused)} without effect: an evaluation takes each sample"
                    " once, in the data set's order."
                )
            source = dataclasses.replace(source, shuffle=False)
            samples = _limited(source, limit, declared_ranks or engine.ranks.data_size)
            plan = StepPlan(
                samples, source.batch_size, engine.ranks.data_size, even=engine.needs_even_rounds
            )
            loader = _sharded(source, plan, seed, engine, bad is not None)
            feeds.append(MapFeed(loader, engine.ranks.data_rank, move, skips=skips))
    for feed, loader_name in zip(feeds, data if named and several else (), strict=False):
        feed.name = str(loader_name)
    return feeds


def _sharded(
    source: Source, plan: StepPlan, seed: int, engine: Engine, guarded: bool
) -> ShardedLoader:
    return ShardedLoader(
        source, plan, engine.ranks.data_rank, seed, engine.comm.broadcast_object, guarded
    )


def _stream(
    data: Any, name: str, limit: Limit, seed: int, engine: Engine, declared: int, guarded: bool
) -> Stream:
    """Return a stream as this rank reads it.

    Raises:
        ConfigError: the limit is a share, or the ranks read different streams that are not declared
            as sharded; or bad samples are skipped, and the stream cannot be read on after one.
    """
    is_loader = isinstance(data, DataLoader) and not iterates_itself(data)
    has_indices = is_loader and not isinstance(data.dataset, IterableDataset)
    if guarded and not has_indices and not isinstance(data, (list, tuple)):
        kind = type(getattr(data, "dataset", data)).__name__
        raise ConfigError(
            f"on_bad_sample is 'skip', but {name} is a stream ({kind}), which cannot be read on"
            " after an error. Catch the error in its own iteration, and set on_bad_sample=raise."
        )
    if isinstance(limit, float):
        raise ConfigError(
            f"A limit of {limit} is a share, but the data is a stream without length. Give a number"
            " of batches."
        )
    if engine.ranks.model_size > 1 and isinstance(data, (Sharded, StreamSource)):
        kind = "trainkit.sharded(...)" if isinstance(data, Sharded) else data.kind
        raise ConfigError(
            f"{name} is {kind}, and the ranks are {engine.ranks.groups}: each rank would read other"
            " samples, and ranks that compute one model must read the same. Pass a"
            " DataLoader or an iterable: its batches are split over the data ranks."
        )
    rank = engine.ranks.data_rank
    world_size = engine.ranks.data_size
    if isinstance(data, StreamSource):
        return data.stream(limit, seed, (rank, world_size), declared, engine.comm.run_on_main)
    reads_own = isinstance(data, Sharded)
    data = data.data if reads_own else data
    # schedules count the same steps on all ranks
    lengths = engine.comm.all_gather_object(_length_of(data))
    length = None if None in lengths else max(lengths)
    if splits_itself(data) and not reads_own:
        reads_own = True
        length = None
        data = split_over_ranks(data, rank, world_size)
    if reads_own:
        return OwnStream(data, length, limit, mix(seed, rank), declared / world_size)
    own = fingerprint(data, seed) if engine.ranks.world_size > 1 else None
    if len(set(engine.comm.all_gather_object(own))) > 1:
        raise ConfigError(
            f"{name}: the ranks read different streams (their first batches differ), so the batches"
            " of one stream cannot be split over them. If each rank reads a part of its own, declare"
            " it: trainkit.sharded(...). If the stream shuffles, give it a fixed seed, so that all"
            " ranks read the same order."
        )
    agree = engine.comm.broadcast_object
    return SplitStream(data, length, limit, seed, (rank, world_size), declared, agree, guarded)


def _length_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:  # a DataLoader has __len__, and its iterable data set may have none
        return None


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
