"""Streams split over ranks and loader workers:
each batch once, the same batches in the same steps however many there are.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    get_worker_info,
)

from tests.helpers.threads import ThreadEngine, World
from trainkit.data.combined import CombinedLoader
from trainkit.data.loader import ShardedLoader, read_source
from trainkit.data.plan import StepPlan
from trainkit.data.splitting import fingerprint
from trainkit.data.streams import OwnStream, SplitStream, Stream, end_workers
from trainkit.errors import ConfigError
from trainkit.extensions.data.web_dataset import split_over_ranks
from trainkit.run.feed_maker import reader_of

LENGTH = 23


class Shuffled(IterableDataset[Any]):
    """Numbers in a random order, with random noise; `splits` by worker as torch's guide does."""

    def __init__(self, splits: bool = False) -> None:
        self.splits = splits

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(LENGTH).tolist()
        random.shuffle(order)
        info = get_worker_info()
        if self.splits and info is not None:
            order = order[info.id :: info.num_workers]
        for number in order:
            yield torch.tensor([float(number), float(np.random.rand()), torch.rand(()).item()])


class Batches(Shuffled):
    """The same as batches of one."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (row[None] for row in super().__iter__())


class Counted:
    """An iterable of batches without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(LENGTH).split(4)


class Pairs(torch.utils.data.Dataset[Any]):
    """A data set with random noise."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class Buckets:
    """A batch sampler with batches of different sizes, drawn again for each epoch."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        for size in (1, 2, 3, 4, 5, 4, 3, 1):
            yield order[:size]
            del order[:size]


def noisy(rows: list[torch.Tensor]) -> torch.Tensor:
    """Collate with a random number that must not disturb the order of the samples."""
    return torch.cat([torch.stack(rows), torch.rand(len(rows), 1)], 1)


BUCKETS: Any = Buckets()
KINDS: dict[str, Any] = {
    "a list": lambda workers: list(torch.arange(LENGTH).split(4)),
    "an iterable": lambda workers: Counted(),
    "an iterable data set": lambda workers: DataLoader(Shuffled(), 4, num_workers=workers),
    "one that splits itself by worker": lambda workers: DataLoader(
        Shuffled(splits=True), 4, num_workers=workers
    ),
    "one that makes batches": lambda workers: DataLoader(Batches(), None, num_workers=workers),
    "a batch sampler": lambda workers: DataLoader(
        Pairs(), batch_sampler=BUCKETS, num_workers=workers
    ),
}


def steps_of(
    data: Any, rank: int, ranks: int, epoch: int = 1, start: int = 0, declared: int = 6
) -> list[list[torch.Tensor]]:
    """Return the batches of each step of one rank."""
    stream = SplitStream(data, None, None, 7, (rank, ranks), declared, lambda drawn: drawn)
    found = []
    for batches in stream.steps(epoch, start, 1):
        found.append(batches)
        if len(found) == 24:
            stream.close()
            return found
    raise AssertionError("a stream of steps has no end")


def merged(by_rank: list[list[list[torch.Tensor]]]) -> list[list[list[float]]]:
    """Return each step's samples of all ranks, sorted."""
    return [
        sorted(
            row.tolist() for rank in step for batch in rank for row in batch.reshape(len(batch), -1)
        )
        for step in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 0), (1, 2), (2, 2)])
def test_each_step_has_the_samples_of_one_process(kind: str, ranks: int, workers: int) -> None:
    """Any number of ranks and workers takes the same samples in each step,
    augmentation included, each once.
    """
    alone = merged([steps_of(KINDS[kind](0), 0, 1)])
    assert merged([steps_of(KINDS[kind](workers), rank, ranks) for rank in range(ranks)]) == alone
    numbers = [row[0] for step in alone for row in step]
    assert len(numbers) == len(set(numbers)) == LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_resumes_at_a_step_with_other_ranks(kind: str) -> None:
    """From step k on, three ranks read what two would have read."""
    whole = merged([steps_of(KINDS[kind](0), rank, 2, declared=2) for rank in range(2)])
    rest = merged([steps_of(KINDS[kind](0), rank, 3, start=2, declared=2) for rank in range(3)])
    assert rest[:-2] == whole[2:]


def test_epochs_differ_and_repeat() -> None:
    """An epoch's order is its own, and the same each time it is read."""
    data = KINDS["an iterable data set"](0)
    first, again, other = (merged([steps_of(data, 0, 1, epoch)]) for epoch in (0, 0, 1))
    assert first == again != other


class Reshuffled(IterableDataset[Any]):
    """Numbers by the epoch that set_epoch gives, as a streamed data set of Hugging Face's."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(LENGTH) + 100.0 * self.epoch


@pytest.mark.parametrize(
    "kind", ["in this process", "in workers", "by itself", "sharded", "combined"]
)
def test_a_data_set_with_set_epoch_has_each_epoch(kind: str) -> None:
    """Before its workers begin, as accelerate calls it; also of what yields batches itself."""
    data: Any = Reshuffled()
    if kind != "by itself":
        more = {"num_workers": 2, "persistent_workers": True} if kind == "in workers" else {}
        data = DataLoader(data, 4, **more)  # type: ignore[arg-type]
    for epoch in (0, 3):
        if kind == "sharded":
            (first,) = next(OwnStream(data, None, None, 7).steps(epoch, 0, 1))
        elif kind == "combined":
            (((first,), *_), *_) = steps_of(CombinedLoader([data]), 0, 1, epoch)
        else:
            ((first, *_), *_) = steps_of(data, 0, 1, epoch)
        assert first.reshape(-1)[0] == 100.0 * epoch


def test_workers_that_a_combined_stream_keeps_are_seeded_by_epoch() -> None:
    """A run that resumes at epoch 1 reads what one reads that had an epoch before."""
    read = []
    for epochs in ((0, 1), (1,)):
        part = DataLoader(Shuffled(), 4, num_workers=1, persistent_workers=True)
        stream = SplitStream(CombinedLoader([part]), None, None, 7, (0, 1), 6, lambda drawn: drawn)
        for epoch in epochs:
            (((first,), *_), *_) = itertools.islice(stream.steps(epoch, 0, 1), 8)
        read.append(first.tolist())
        end_workers(part)
    assert read[0] == read[1]


class AtOnce(Pairs):
    """A data set that makes the batches of lists of indices, or of one."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        several = index if isinstance(index, list) else [index]
        return torch.stack([super(AtOnce, self).__getitem__(each) for each in several])


class Tensors:
    """A sampler that yields tensors, as an iteration of torch.randperm does."""

    def __init__(self, as_arrays: bool = False) -> None:
        self.as_arrays = as_arrays

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(LENGTH)
        return iter(order.numpy() if self.as_arrays else order)


def doubled(rows: torch.Tensor) -> torch.Tensor:
    """Collate with a random number."""
    return torch.cat([rows, torch.rand(len(rows), 1)], 1)


SAMPLERS: dict[str, Any] = {
    "lists": lambda: BatchSampler(RandomSampler(range(LENGTH)), 4, False),
    "tensors": Tensors,
    "arrays": lambda: Tensors(as_arrays=True),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (1, 2)])
def test_a_data_set_that_makes_batches_has_its_samplers_keys(
    kind: str, ranks: int, workers: int
) -> None:
    """batch_size=None with a BatchSampler, as in torch's guide, or with numbers of other types:
    the random numbers are those of the key, on any number of ranks and workers.
    """

    def data(workers: int) -> DataLoader[Any]:
        sampler, collate = SAMPLERS[kind](), doubled
        return DataLoader(AtOnce(), None, sampler=sampler, collate_fn=collate, num_workers=workers)

    alone = merged([steps_of(data(0), 0, 1)])
    assert merged([steps_of(data(workers), rank, ranks) for rank in range(ranks)]) == alone
    assert len({tuple(row) for step in alone for row in step}) == LENGTH
    assert len({row[1] for step in alone for row in step}) == LENGTH


class Failing(AtOnce):
    """It has no sample 3."""

    files = ["name"] * LENGTH

    def __getitem__(self, index: Any) -> torch.Tensor:
        if 3 in index:
            raise ValueError("no sample 3")
        return super().__getitem__(index)


def test_an_error_of_a_list_of_indices_stays_what_it_is() -> None:
    """With the key beside it; also of a part of the data set."""
    for data in (Failing(), Subset(Failing(), range(4))):
        sampler = BatchSampler(range(4), 4, False)
        with pytest.raises(ValueError, match="no sample 3"):
            steps_of(DataLoader(data, None, sampler=sampler), 0, 1)


class Fixed:
    """A sampler of given draws."""

    def __init__(self, draws: list[Any]) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draws)


@pytest.mark.parametrize("draws", [[(0, 320), (1, 640)], ["0", "12"], [0.0, 1.0]])
@pytest.mark.parametrize("place", ["sampler", "batch sampler", "in a list"])
def test_keys_that_are_no_numbers_are_refused(draws: list[Any], place: str) -> None:
    """An order that is split over ranks is of indices: the sampler is named, with what to do."""
    fixed: Any = Fixed([draws] if place == "batch sampler" else draws)
    with pytest.raises(ConfigError, match=r"Fixed draws .*trainkit\.sharded\(loader\)"):  # noqa: PT012
        if place == "sampler":
            source = read_source(DataLoader(Pairs(), 2, sampler=fixed), "data", True)
            assert source is not None
            plan = StepPlan(len(draws), 2, 1)
            list(ShardedLoader(source, plan, 0, 7, list).iterate(plan, 0, 0))
        elif place == "batch sampler":
            steps_of(DataLoader(Pairs(), batch_sampler=fixed), 0, 1)
        else:
            fixed = DataLoader(Pairs(), batch_sampler=Fixed([draws]))  # type: ignore[arg-type]
            steps_of(CombinedLoader([fixed]).joined("data"), 0, 1)


def test_an_error_of_a_sampler_stays_its_own() -> None:
    """It is not taken for one of its draws."""

    class Raising(Fixed):
        def __iter__(self) -> Iterator[Any]:
            raise TypeError("my own")

    sampler: Any = Raising([0])
    with pytest.raises(TypeError, match="my own"):
        steps_of(DataLoader(Pairs(), batch_sampler=sampler), 0, 1)


def with_generators(**options: Any) -> list[DataLoader[Any]]:
    """Return loaders that draw from a generator, one of them with replacement."""
    generator = torch.Generator().manual_seed(3)
    replaced = RandomSampler(Pairs(), replacement=True, generator=generator)
    return [
        DataLoader(Pairs(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), **options),
        DataLoader(Pairs(), 4, sampler=replaced, **options),
    ]


GENERATORS: dict[str, Any] = {
    "a list": lambda: CombinedLoader(with_generators()).joined("data"),
    "with a stream": lambda: CombinedLoader([*with_generators(), DataLoader(Shuffled(), 4)]),
    "sharded": lambda: with_generators()[1],
    "sharded, in workers": lambda: with_generators(num_workers=1, persistent_workers=True)[1],
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_loaders_draw_by_epoch(kind: str) -> None:
    """A run that resumes at epoch 1 reads what one reads that had an epoch before."""
    read = []
    for epochs in ((0, 1), (1,)):
        data = GENERATORS[kind]()
        stream: Stream = (
            OwnStream(data, None, None, 7)
            if kind.startswith("sharded")
            else SplitStream(data, None, None, 7, (0, 1), 1, list)
        )
        orders = []
        for epoch in epochs:
            steps = stream.steps(epoch, 0, 1)
            orders.append(str([next(steps) for _ in range(3)]))
            steps.close()  # type: ignore[attr-defined]
        stream.close()
        read.append(orders)
    assert read[0][1] == read[1][0]
    assert read[0][0] != read[0][1]


def test_a_generator_is_what_it_was_after_an_epoch() -> None:
    """Its state and its seed: a second fit begins as the first."""
    (loader, _) = with_generators()
    steps = OwnStream(loader, None, None, 7).steps(0, 0, 1)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert loader.generator.initial_seed() == 5
    fresh = torch.Generator().manual_seed(5).get_state()
    assert torch.equal(loader.generator.get_state(), fresh)


class Unseeded(Shuffled):
    """Numbers in an order of the machine's random numbers: another in each worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.from_numpy(np.random.default_rng().permutation(LENGTH))


class OwnNumbers(Shuffled):
    """Numbers in an order of a generator that the data set has: each worker has a copy of it."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.from_numpy(self.rng.permutation(LENGTH))


class KeptRows(IterableDataset[Any]):
    """Given samples."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.rows


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_read_different_streams_are_refused(start: str) -> None:
    """Split over them, samples would be lost, and others come twice."""
    data = DataLoader(Unseeded(), 4, num_workers=2, multiprocessing_context=start)
    with pytest.raises(ConfigError, match=r"^The loader workers .* of Unseeded .*sharded\(loader"):
        steps_of(data, 0, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_worker_may_read_any_stream(workers: int) -> None:
    """One worker cannot differ from another."""
    (step, *_) = steps_of(DataLoader(Unseeded(), 4, num_workers=workers), 0, 1)
    assert sum(map(len, step)) == LENGTH


class Noisy(IterableDataset[Any]):
    """Numbers in order, with noise that no seed determines, in types that numpy lacks too."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(LENGTH):
            noise = float(os.urandom(1)[0])
            small = torch.tensor(noise).to(torch.float8_e4m3fn)
            turned = torch.tensor([1 + 2j]).conj()
            yield torch.tensor(number), noise, small, turned, np.float32(noise)


def test_noise_is_no_order() -> None:
    """An augmentation may draw other numbers in each worker: no sample is lost by it."""

    def numbers(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples])

    (step, *_) = steps_of(DataLoader(Noisy(), 4, num_workers=2, collate_fn=numbers), 0, 1)
    assert torch.cat(step).tolist() == list(range(LENGTH))


def test_workers_may_have_copies_of_one_generator() -> None:
    """They draw the same order in each epoch."""
    data = DataLoader(OwnNumbers(), 4, num_workers=2, persistent_workers=True)
    stream = SplitStream(data, None, None, 7, (0, 1), 6, lambda drawn: drawn)
    for epoch in range(3):
        pulled = next(stream.steps(epoch, 0, 1))
        assert sorted(torch.cat(pulled).tolist()) == list(range(LENGTH))
    stream.close()


class Range(IterableDataset[Any]):
    """Numbers from start to end."""

    def __init__(self) -> None:
        self.start, self.end, self.scale = 0, LENGTH, 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.start, self.end) * self.scale


def take_a_part(worker: int) -> None:
    """Give each worker a part of the numbers, as the second example of torch's guide does."""
    info: Any = get_worker_info()
    size = -(-info.dataset.end // info.num_workers)
    info.dataset.start, info.dataset.end = size * worker, min(size * (worker + 1), LENGTH)


def scale(worker: int) -> None:
    """Set an attribute alike in all workers."""
    info: Any = get_worker_info()
    info.dataset.scale = 3


def test_a_worker_init_fn_that_gives_workers_parts_is_refused() -> None:
    """The workers of a stream read all of it, and take turns with its batches."""
    data = DataLoader(Range(), 4, num_workers=2, worker_init_fn=take_a_part)
    with pytest.raises(ConfigError, match=r"^The loader workers read different streams of Range"):
        steps_of(data, 0, 1)


@pytest.mark.parametrize("splits", [False, True])
def test_a_worker_init_fn_sets_attributes_of_the_stream(splits: bool) -> None:
    """Of the user's data set, not of what splits it; also of a WebDataset."""
    workers = 1 if splits else 2
    data = DataLoader(Range(), 4, num_workers=workers, worker_init_fn=scale)
    if splits:
        data = split_over_ranks(data, 0, 1)
        step = [
            batch for (batch,) in itertools.islice(OwnStream(data, None, None, 7).steps(0, 0, 1), 6)
        ]
    else:
        step = steps_of(data, 0, 1)[0]
    assert torch.cat(step).tolist() == [3 * number for number in range(LENGTH)]


def test_streams_shorter_than_the_workers_are_read() -> None:
    """Also one without a sample."""
    for rows in ([], [torch.ones(1)]):
        data: Any = DataLoader(KeptRows(rows), 4, num_workers=2)
        (step, *_) = steps_of(data, 0, 1)
        assert sum(map(len, step)) == len(rows)


def test_a_collate_function_may_draw() -> None:
    """Random numbers of a rank's collate function do not change which samples the ranks take."""
    alone, shared = (
        [
            merged(
                [
                    steps_of(DataLoader(Shuffled(), 4, collate_fn=noisy), rank, n)
                    for rank in range(n)
                ]
            )
        ]
        for n in (1, 2)
    )
    assert [[row[:3] for row in step] for step in alone[0]] == [
        [row[:3] for row in step] for step in shared[0]
    ]


def test_a_limit_counts_the_batches_of_a_rank() -> None:
    """With a limit of 2 on each of 2 ranks the epoch has 4 batches."""
    streams = [SplitStream(KINDS["a list"](0), 6, 2, 7, (rank, 2), 2, list) for rank in range(2)]
    assert [stream.num_steps(1) for stream in streams] == [2, 2]
    pulled = [
        [len(next(steps)) for _ in range(3)]
        for steps in (stream.steps(0, 0, 1) for stream in streams)
    ]
    assert pulled == [[1, 1, 0], [1, 1, 0]]


def test_a_stream_of_its_own_is_read_whole() -> None:
    """What is declared as sharded is not split."""
    stream = OwnStream([1, 2, 3], 3, None, 0)
    steps = stream.steps(0, 0, 1)
    assert [next(steps) for _ in range(4)] == [[1], [2], [3], []]


def test_fingerprints_notice_another_order() -> None:
    """Ranks compare their first batch: one order for all, or a digest that differs;
    a stream that is read once has none.
    """
    same = [fingerprint(DataLoader(Shuffled(), 4), 3) for _ in range(2)]
    assert same[0] == same[1] != fingerprint(DataLoader(Shuffled(), 4), 4)
    assert fingerprint(iter([1]), 3) is None

    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.rows = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.rows

    once = Once()
    assert fingerprint(once, 3) is None
    assert list(once) == [0, 1, 2]
    assert fingerprint([{"a": torch.ones(2)}], 3) != fingerprint([{"a": torch.zeros(2)}], 3)


def test_rank_0_draws_the_batches_of_a_batch_sampler() -> None:
    """All ranks share out rank 0's batches,
    also if their samplers draw from a generator of their own.
    """

    class Own(Buckets):
        def __iter__(self) -> Iterator[list[int]]:
            rng = np.random.default_rng()
            for batch in rng.permutation(LENGTH).reshape(-1, 1):
                yield batch.tolist()

    def work(engine: ThreadEngine) -> list[list[torch.Tensor]]:
        loader: DataLoader[Any] = DataLoader(Pairs(), batch_sampler=Own())  # type: ignore[arg-type]
        stream = SplitStream(
            loader, None, None, 7, (engine.place, 2), 2, engine.comm.broadcast_object
        )
        steps = stream.steps(0, 0, 1)
        return [next(steps) for _ in range(LENGTH)]

    rows = [row for step in merged(World(2).run(work)) for row in step]
    assert sorted(row[0] for row in rows) == list(range(LENGTH))


# it closes no file
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_splits_its_shards_over_all_workers(workers: int, tmp_path: Path) -> None:
    """Shards go to the workers of all ranks, each sample once,
    though it shuffles with random numbers of its own.
    """
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for number in range(5):
                tar.write(
                    {
                        "__key__": f"{shard}{number}",
                        "x.npy": np.full(1, 5.0 * shard + number, dtype=np.float32),
                    }
                )
    data = (
        wds.WebDataset(str(tmp_path / "{0..3}.tar"), shardshuffle=4)
        .shuffle(8)
        .decode()
        .to_tuple("x.npy")
    )
    loader: DataLoader[Any] = DataLoader(data, 2, num_workers=workers)
    assert reader_of(loader) == "trainkit.extensions.data.web_dataset.read"
    seen: list[float] = []
    for rank in range(2):
        stream = OwnStream(split_over_ranks(loader, rank, 2), None, None, rank)
        for pulled in stream.steps(0, 0, 1):
            if not pulled:
                break
            seen += pulled[0][0].reshape(-1).tolist()
        stream.close()
    assert sorted(seen) == list(range(20))
    del data, loader, stream, pulled
    gc.collect()  # within this test
