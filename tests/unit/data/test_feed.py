"""Feeds: the steps that the loop pulls, from data sets and from streams."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainkit.data.feed import Feed, MapFeed, StreamFeed
from trainkit.data.loader import read_source
from trainkit.data.streams import OwnStream, sharded
from trainkit.engine.single import SingleEngine
from trainkit.errors import ConfigError, DataError, TaskError
from trainkit.run.feed_maker import FeedMaker, reader_of


class Stream(IterableDataset[Any]):
    """Rows of numbers from 0 on, without a length."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = 0
        for size in self.sizes:
            yield torch.arange(first, first + size)
            first += size


def keep(batch: Any) -> Any:
    """Move nothing."""
    return batch


def stream_feed(
    sizes: list[int], accumulate: int = 1, limit: int | None = None, total: Any = int
) -> StreamFeed:
    """Return the feed of a stream of such batches; `total` replaces the sum over ranks."""
    return StreamFeed(
        OwnStream(Stream(sizes), None, limit, 0), lambda epoch: accumulate, total, keep
    )


def train_feed(
    data: Any, source: Any, changes: Any, limit: Any = None, engine: Any = None, pad: bool = False
) -> Feed:
    """Return the feed of training data; on an engine of one process if none is given."""
    maker = FeedMaker(engine or SingleEngine("cpu"), seed=0)
    return maker.for_training(data, source, changes, limit, keep, pad)


def map_feed(num_samples: int, accumulate: int = 1, **options: Any) -> Feed:
    """Return the feed of a data set in microbatches of 4."""
    data = DataLoader(TensorDataset(torch.arange(num_samples)), 4, **options)
    source = read_source(data, "data", training=True)
    return train_feed(data, source, [(0, accumulate)])


def pull(feed: Feed, epoch: int = 0, start: int = 0) -> list[tuple[int, list[tuple[int, bool]]]]:
    """Return (samples of the step, [(samples, is_last) of each microbatch]) for each step."""
    return [
        (s.num_samples, [(m.num_samples, m.is_last) for m in s.microbatches])
        for s in feed.steps(epoch, start)
    ]


def test_a_data_set_gives_its_steps() -> None:
    """Steps hold `accumulate` microbatches, the last one marked;
    a short last step the rest, evenly.
    """
    assert map_feed(13, accumulate=2).num_steps_in(0) == 2
    assert pull(map_feed(13, accumulate=2)) == [
        (8, [(4, False), (4, True)]),
        (5, [(3, False), (2, True)]),
    ]


def test_microbatches_know_their_places() -> None:
    """A microbatch of a data set has its samples' places in the order, and holds those samples."""
    feed = map_feed(6)
    micros = [m for step in feed.steps(0) for m in step.microbatches]
    assert [m.places for m in micros] == [range(4), range(4, 6)]
    assert [m.batch[0].tolist() for m in micros] == [[0, 1, 2, 3], [4, 5]]


def test_an_epoch_resumes_at_a_step() -> None:
    """From step k on, an epoch has the samples that it would have had."""
    feed = map_feed(23, accumulate=2, shuffle=True)
    whole = [m.batch[0].tolist() for s in feed.steps(1) for m in s.microbatches]
    rest = [m.batch[0].tolist() for s in feed.steps(1, start=1) for m in s.microbatches]
    assert rest == whole[2:]


def test_accumulation_changes_by_epoch() -> None:
    """From an epoch on, steps hold another number of microbatches;
    the samples and their order stay the epoch's.
    """
    data = DataLoader(TensorDataset(torch.arange(24)), 4, shuffle=True)
    source = read_source(data, "data", training=True)
    feed = train_feed(data, source, [(0, 3), (2, 1)])
    plain = map_feed(24, shuffle=True)
    assert [feed.num_steps_in(epoch) for epoch in range(4)] == [2, 2, 6, 6]
    for epoch, microbatches in enumerate([3, 3, 1]):
        steps = [[m.batch[0].tolist() for m in s.microbatches] for s in feed.steps(epoch)]
        assert all(len(step) == microbatches for step in steps)
        assert sum(steps, []) == [
            m.batch[0].tolist() for s in plain.steps(epoch) for m in s.microbatches
        ]


def test_a_streams_accumulation_changes_by_epoch() -> None:
    """A stream's batches are grouped by the epoch's accumulation."""
    feed = StreamFeed(
        OwnStream(Stream([1] * 4), 4, None, 0), lambda epoch: 4 - 2 * epoch, int, keep
    )
    assert (
        [feed.num_steps_in(0), feed.num_steps_in(1)]
        == [len(pull(feed, 0)), len(pull(feed, 1))]
        == [1, 2]
    )


def test_microbatches_tell_their_indices() -> None:
    """A microbatch's places lead to the data set's indices; a stream has none."""
    feed = map_feed(9, shuffle=True)
    for micro in [m for step in feed.steps(3) for m in step.microbatches]:
        assert feed.indices(3, micro) == micro.batch[0].tolist()
    stream = stream_feed([2])
    assert stream.indices(0, next(next(stream.steps(0)).microbatches)) is None


def test_drop_last_is_of_the_whole_data() -> None:
    """A limit in microbatches leaves some also if they are too few
    for an accumulated step (fast_dev_run).
    """
    data = DataLoader(TensorDataset(torch.arange(40)), 4, drop_last=True)
    feed = train_feed(data, read_source(data, "data", True), [(0, 4)], 1)
    assert pull(feed) == [(4, [(4, True)])]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("samples", [13, 24, 5])
def test_a_short_last_step_is_filled_where_asked(ranks: int, samples: int) -> None:
    """Every step is full on every rank; the epoch's first samples fill the last one, in order."""
    data = DataLoader(TensorDataset(torch.arange(samples)), 4, shuffle=True)
    source = read_source(data, "data", training=True)
    shares: list[list[list[int]]] = []
    for rank in range(ranks):
        engine = SingleEngine("cpu")
        engine.ranks.rank, engine.ranks.world_size = rank, ranks
        feed = train_feed(data, source, [(0, 2)], engine=engine, pad=True)
        assert all(step.num_samples == 8 * ranks for step in feed.steps(0))
        micros = [m for step in feed.steps(0) for m in step.microbatches]
        assert [feed.indices(0, m) for m in micros] == [m.batch[0].tolist() for m in micros]
        shares.append([m.batch[0].tolist() for m in micros])
    taken = sum((share for cells in zip(*shares, strict=True) for share in cells), [])
    order = taken[:samples]
    assert sorted(order) == list(range(samples))
    assert taken == (order * (len(taken) // samples + 1))[: len(taken)]


def test_what_cannot_be_filled_is_refused() -> None:
    """Streams and drop_last know no short last step."""
    with pytest.raises(
        ConfigError, match=r"pad_last_step is true, but the last step of a stream is unknown"
    ):
        train_feed([torch.zeros(2)], None, [(0, 1)], pad=True)
    data = DataLoader(TensorDataset(torch.arange(9)), 4, drop_last=True)
    with pytest.raises(
        ConfigError, match=r"pad_last_step is true, but drop_last=True leaves out the last step"
    ):
        train_feed(data, read_source(data, "data", True), [(0, 1)], pad=True)


def test_drop_last_must_leave_something() -> None:
    """A data set smaller than a step has no step with drop_last."""
    with pytest.raises(
        DataError, match=r"drop_last=True leaves nothing: .* 7 samples, a step takes 8"
    ):
        map_feed(7, accumulate=2, drop_last=True)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_no_training_data_by_limit(limit: float) -> None:
    """A limit that leaves no sample to train on is refused by its own name."""
    data = TensorDataset(torch.arange(4))
    source = read_source(data, "data", training=True)
    with pytest.raises(
        ConfigError, match=r"trainer\.limit_train_batches is 0(\.0)?; it must be above 0"
    ):
        train_feed(data, source, [(0, 1)], limit)


@pytest.mark.parametrize(("limit", "samples"), [(2, 8), (0.5, 11), (99, 23), (1.0, 23), (0.05, 1)])
def test_limits_are_counts_or_shares(limit: float, samples: int) -> None:
    """A whole number limits the microbatches of a rank, a fraction the share of the data."""
    data = DataLoader(TensorDataset(torch.arange(23)), 4)
    feed = train_feed(data, read_source(data, "data", True), [(0, 1)], limit)
    assert isinstance(feed, MapFeed)
    assert feed.plan_of(0).num_samples == samples


def test_a_share_that_leaves_no_sample_is_refused() -> None:
    """It would train on another share than was asked for."""
    data = DataLoader(TensorDataset(torch.arange(23)), 4)
    source = read_source(data, "data", True)
    with pytest.raises(ConfigError, match=r"A limit of 0\.04 of 23 samples leaves none"):
        train_feed(data, source, [(0, 1)], 0.04)


def test_a_stream_gives_its_steps() -> None:
    """A stream's batches are grouped into steps, and the samples of a step are counted."""
    assert pull(stream_feed([3, 2, 4], accumulate=2)) == [
        (5, [(3, False), (2, True)]),
        (4, [(4, True)]),
    ]


def test_a_stream_restarts_each_epoch() -> None:
    """Each epoch iterates the stream from its beginning."""
    feed = stream_feed([3, 2])
    assert pull(feed, 0) == pull(feed, 1) == [(3, [(3, True)]), (2, [(2, True)])]


def test_a_stream_resumes_at_a_step() -> None:
    """A stream that is taken up at step k skips the batches of the steps before."""
    assert pull(stream_feed([3, 2, 4, 1], accumulate=2), start=1) == [(5, [(4, False), (1, True)])]


def test_a_stream_is_limited_in_microbatches() -> None:
    """A limit counts microbatches of this rank."""
    assert pull(stream_feed([3, 2, 4], limit=2)) == [(3, [(3, True)]), (2, [(2, True)])]


def test_a_rank_with_an_ended_stream_continues_with_the_others() -> None:
    """A rank without data left takes part in empty steps until all have ended."""
    totals = iter([5, 2, 0])
    assert pull(stream_feed([3], total=lambda own: next(totals))) == [(5, [(3, True)]), (2, [])]


@pytest.mark.parametrize(("other", "steps"), [(7, 4), (1, 2), (None, None)])
def test_streams_of_different_lengths_count_the_same_steps(
    other: int | None, steps: int | None
) -> None:
    """All ranks plan with the longest stream, so their schedules agree;
    without a length no rank plans.
    """

    engine = SingleEngine("cpu")
    engine.comm.all_gather_object = lambda value: [value, other]  # type: ignore[method-assign]
    feed = train_feed(sharded([torch.zeros(2)] * 3), None, [(0, 2)], engine=engine)
    assert feed.num_steps_in(0) == steps


def test_a_loader_over_a_stream_has_no_length() -> None:
    """A DataLoader over an iterable data set without a length is a stream without a length."""
    feed = train_feed(DataLoader(Stream([3, 2]), batch_size=None), None, [(0, 1)])
    assert feed.num_steps_in(0) is None
    assert len(pull(feed)) == 2


def test_a_share_of_a_stream_is_refused() -> None:
    """A stream has no length of which to take a share."""
    with pytest.raises(ConfigError, match=r"A limit of 0\.5 is a share, but the data is a stream"):
        train_feed(Stream([2]), None, [(0, 1)], 0.5)


def test_a_share_of_batches_of_known_number() -> None:
    """A batch sampler has a length; a share that leaves no batch to a rank is refused."""
    batches = [[0, 1], [2], [3, 4], [5], [6]]
    data = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=batches)  # type: ignore[arg-type]
    feed = train_feed(data, None, [(0, 1)], 0.5)
    assert feed.num_steps_in(0) == 2
    assert len(pull(feed)) == 2
    with pytest.raises(ConfigError, match=r"A limit of 0\.1 of 5 batches leaves none to a rank"):
        train_feed(data, None, [(0, 1)], 0.1)


def test_a_streams_batch_must_be_countable() -> None:
    """A stream of batches without tensors, arrays or lists is refused."""
    feed = StreamFeed(OwnStream([{"a": 1}], None, None, 0), lambda epoch: 1, int, keep)
    with pytest.raises(TaskError, match="no tensor, array or list. Add a tensor"):
        pull(feed)


@pytest.mark.parametrize(
    "batch",
    [
        ["a", "b", "c"],  # as torch collates texts, and the next one pairs of them
        [("a", "b", "c"), ("x", "y", "z")],
        {"name": "all", "texts": ["a", "b", "c"]},
        [{"text": "a"}, {"text": "b"}, {"text": "c"}],
        np.zeros((3, 2)),
        [np.zeros((3, 2)), np.zeros(3)],
    ],
)
def test_samples_of_texts_and_arrays_are_counted(batch: Any) -> None:
    """A Task may make tensors of them itself."""
    feed = StreamFeed(OwnStream([batch], None, None, 0), lambda epoch: 1, int, keep)
    assert pull(feed) == [(3, [(3, True)])]


class FromLitData(Stream):
    """A data set that has taken its part when it was made."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__([2])
        self.distributed_env = SimpleNamespace(global_rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("is_sharded", "part", "is_right"),
    [
        (False, (0, 1), True),  # all of it, whose batches are split
        (False, (0, 2), False),
        (True, (1, 2), True),
        (True, (0, 2), False),
        (True, (0, 1), False),
    ],
)
def test_litdatas_part_is_this_ranks(
    is_sharded: bool, part: tuple[int, int], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rank 0 on all ranks of torchrun, and of one rank under others: samples would be left
    out.
    """
    monkeypatch.setattr(FromLitData, "__module__", "litdata.streaming.dataset")
    engine = SingleEngine("cpu")
    engine.ranks.rank, engine.ranks.world_size = 1, 2
    loader = DataLoader(FromLitData(*part), batch_size=None)
    data = sharded(loader) if is_sharded else loader
    if is_right:
        train_feed(data, None, [(0, 1)], engine=engine)
        return
    with pytest.raises(ConfigError, match=f"took a rank for rank {part[0]} of {part[1]}, by"):
        train_feed(data, None, [(0, 1)], engine=engine)


class Remote:
    """A source of its own kind, whose data set is rank 0's alone (as RayData)."""

    @property
    def dataset(self) -> Any:
        """Start what only rank 0 may."""
        raise AssertionError("read on each rank")


def test_only_a_loaders_data_set_is_looked_at() -> None:
    """Another object may start a cluster as its `dataset` is read."""
    assert reader_of(Remote()) is None
