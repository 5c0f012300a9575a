"""Loaders: a user's data, sharded over ranks, on any number of workers."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import signal_handling
from torch.utils.data.distributed import DistributedSampler

from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.data.loader import ShardedLoader, read_source
from trainkit.data.order import SeededDataset as Seeded
from trainkit.data.order import shuffled
from trainkit.data.plan import StepPlan
from trainkit.data.streams import SplitStream
from trainkit.errors import ConfigError, DataError


class Numbers(Dataset[Any]):
    """The numbers below n, each with noise from all three sources."""

    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float]:
        if not 0 <= index < self.n:
            raise IndexError
        return index, float(torch.rand(())) + float(np.random.rand()) + random.random()


class Broken(Numbers):
    """A data set with a sample that cannot be used."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        raise DataError(f"sample {index} is no image: give another file.")


class Stream(IterableDataset[Any]):
    """An iterable with a length."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.zeros(3), torch.zeros(2))


def sharded(
    data: DataLoader[Any], rank: int = 0, world: int = 1, seed: int = 0, agree: Any = list
) -> ShardedLoader:
    """Return the loader of one rank."""
    source = read_source(data, "data", training=True)
    assert source is not None
    return ShardedLoader(
        source, StepPlan(source.num_samples, source.batch_size, world), rank, seed, agree
    )


def indices(loader: ShardedLoader, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """Return the indices of each microbatch of an epoch, from a step on."""
    return [batch[0].tolist() for batch in loader.iterate(loader.plan, epoch, start)]


def test_samples_come_in_the_data_sets_order() -> None:
    """Without shuffling the microbatches go through the data set."""
    assert indices(sharded(DataLoader(Numbers(), 4))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_shuffling_is_a_function_of_seed_and_epoch() -> None:
    """shuffle=True gives the permutation of (seed, epoch), independent of the user's generator."""
    generator = torch.Generator().manual_seed(99)
    loader = sharded(DataLoader(Numbers(), 4, shuffle=True, generator=generator), seed=5)
    for epoch in (0, 1, 0):
        assert sum(indices(loader, epoch), []) == shuffled(10, 5, epoch).tolist()


def test_ranks_share_one_order() -> None:
    """Together the ranks' microbatches are the order that one rank would go through."""
    parts = [
        indices(sharded(DataLoader(Numbers(), 2, shuffle=True), rank, 2), epoch=3)
        for rank in range(2)
    ]
    in_turn = [i for pair in zip(*parts, strict=True) for micro in pair for i in micro]
    assert in_turn == shuffled(10, 0, 3).tolist()


def test_an_epoch_can_begin_at_any_step() -> None:
    """From step k on come the samples that would have come without the steps before it."""
    loader = sharded(DataLoader(Numbers(), 3, shuffle=True))
    assert indices(loader, 2, start=2) == indices(loader, 2)[2:]
    assert indices(loader, 2, start=4) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_does_not_depend_on_workers(num_workers: int) -> None:
    """A sample's random numbers are the same in the main process
    and in workers that live on over epochs.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = sharded(DataLoader(Numbers(), 4, shuffle=True, **options))
    for epoch in (0, 1, 1):
        seen = [
            (i, x)
            for numbers, xs in loader.iterate(loader.plan, epoch, 0)
            for i, x in zip(*map(list, (numbers, xs)), strict=True)
        ]
        alone = [loader._loader.dataset[epoch, int(i)] for i, _ in seen]
        assert [(int(i), float(x)) for i, x in seen] == alone
    workers = getattr(loader._loader._iterator, "_workers", [])
    assert len(workers) == num_workers
    loader.close()
    for worker in workers:
        worker.join(60)  # it ends by itself, later on a busy machine
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_leaves_the_random_state_alone(num_workers: int) -> None:
    """Loading draws from separate random numbers:
    the model's dropout does not depend on the loading process.
    """
    loader = sharded(DataLoader(Numbers(), 4, shuffle=True, num_workers=num_workers))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    indices(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_a_sampler_of_the_users_own_draws_the_order() -> None:
    """A custom sampler's draw is the order, and all ranks use rank 0's draw."""
    data = DataLoader(Numbers(), 2, sampler=WeightedRandomSampler([0, 0, 1, 1], num_samples=6))
    agreed: list[int] = []

    def agree(own: list[int]) -> list[int]:
        agreed.extend(own)
        return [5, 4, 3, 2, 1, 0]

    assert indices(sharded(data, rank=1, world=3, agree=agree)) == [[3, 2]]
    assert len(agreed) == 6
    assert set(agreed) == {2, 3}


def test_a_samplers_order_changes_each_epoch_and_repeats_after_a_restart() -> None:
    """A custom sampler's order is a function of (seed, epoch),
    so a run that resumes in an epoch has the same order.
    """
    data = DataLoader(Numbers(), 2, sampler=WeightedRandomSampler([1.0] * 10, num_samples=10))
    first, second = indices(sharded(data), 0), indices(sharded(data), 1)
    torch.rand(3)
    assert first != second
    assert indices(sharded(data), 0, start=2) == first[2:]


class Draws(SequentialSampler):
    """A sampler that draws given indices; `length` is what it promises."""

    def __init__(self, drawn: Any, length: int | None = None) -> None:
        self.drawn, self.length = drawn, length

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn) if self.length is None else self.length


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_sample_that_comes_again_has_other_random_numbers(kind: str, workers: int) -> None:
    """As in a plain loop, where each drawing is augmented by itself; the first is as before."""
    order = [3, 3, 1, 3, 1, 3]
    own: Any = Draws(order)
    if kind == "batch_sampler":
        own = Draws([order[:2], order[2:4], order[4:]])
    options: dict[str, Any] = {"num_workers": workers}
    data = DataLoader(
        Numbers(), **({"batch_size": 2} if kind == "sampler" else {}), **{kind: own}, **options
    )

    def noise(start: int = 0, rank: int = 0, world: int = 1) -> list[float]:
        if kind == "sampler":
            part = sharded(data, rank, world)
            batches = list(part.iterate(part.plan, 0, start))
        else:
            stream = SplitStream(data, None, None, 0, (rank, world), world, list)
            steps = stream.steps(0, start, 1)
            batches = [batch for _ in range(3 // world - start) for batch in next(steps)]
            stream.close()
        return [float(x) for _, xs in batches for x in xs]

    whole = noise()
    assert len({*whole}) == 6
    assert noise(start=1) == whole[2:] and noise() == whole
    assert whole[0] == Seeded(Numbers(), 0)[0, 3][1] and whole[2] == Seeded(Numbers(), 0)[0, 1][1]
    if kind == "batch_sampler":
        assert noise(rank=1, world=2)[:2] == whole[2:4]


@pytest.mark.parametrize("given", [range(8), itertools.count()])
def test_a_sampler_draws_as_many_as_its_length_says(given: Any) -> None:
    """One without end is asked for no more; one that draws fewer would leave a step empty."""
    part = sharded(DataLoader(Numbers(), 4, sampler=Draws(given, 10)))
    if isinstance(given, range):
        with pytest.raises(DataError, match=r"A Draws has drawn 8 indices, and its length prom"):
            indices(part)
    else:
        assert indices(part) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Counts(SequentialSampler):
    """A sampler that counts its epochs itself, after the last index."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        yield from [(i + self.passes) % 4 for i in range(4)]
        self.passes += 1

    def __len__(self) -> int:
        return 4


def test_a_sampler_runs_to_its_end() -> None:
    """As in a DataLoader: what it does there shapes its next order."""
    part = sharded(DataLoader(Numbers(), 4, sampler=Counts()))
    assert [indices(part, epoch) for epoch in range(2)] == [[[0, 1, 2, 3]], [[1, 2, 3, 0]]]


class Epochs(SequentialSampler):
    """A sampler that draws given indices."""

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)

    def __len__(self) -> int:
        return 4


def test_a_sampler_receives_the_epoch() -> None:
    """A sampler's `set_epoch` receives the epoch;
    a subclass of torch's sampler draws for itself.
    """
    loader = sharded(DataLoader(Numbers(), 4, sampler=Epochs(Numbers())))
    assert indices(loader, epoch=7) == [[7, 7, 7, 7]]


class ByEpoch(Numbers):
    """Samples by the epoch that set_epoch gives."""

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([100 * self.epoch + index])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_receives_the_epoch(workers: int) -> None:
    """Also where its samples are read: persistent workers have copies of it."""
    more: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = sharded(DataLoader(ByEpoch(), 10, num_workers=workers, **more))
    for epoch in (0, 2):
        (batch,) = loader.iterate(loader.plan, epoch, 0)
        assert batch.flatten().tolist() == [100 * epoch + i for i in range(10)]


class Opened(Numbers):
    """A data set that its worker opens."""

    path = "numbers.h5"

    def __getitem__(self, index: int) -> Any:
        return index, self.opened  # type: ignore[attr-defined]


def open_in_worker(worker: int) -> None:
    """Open the worker's data set, as torch's guide does."""
    info: Any = get_worker_info()
    info.dataset.opened = f"{info.dataset.path}:{worker}"


@pytest.mark.parametrize("guarded", [False, True])
def test_a_worker_init_fn_has_the_users_data_set(guarded: bool) -> None:
    """It reads and sets attributes of the data set that the worker then reads."""
    data = DataLoader(Opened(4), 2, num_workers=1, worker_init_fn=open_in_worker)
    source = read_source(data, "data", training=False)
    assert source is not None
    loader = ShardedLoader(source, StepPlan(4, 2, 1), 0, 0, list, guarded)
    batches = list(loader.iterate(loader.plan, 0, 0))
    assert [list(names) for _, names in batches] == [["numbers.h5:0"] * 2] * 2


def test_two_loaders_of_one_data_set_have_their_own_epochs() -> None:
    """A validation inside an epoch reads the training data as epoch 0; the rest of the training's
    epoch keeps its own.
    """
    data = ByEpoch()
    training, validation = sharded(DataLoader(data, 5)), sharded(DataLoader(data, 5))
    batches = training.iterate(training.plan, 3, 0)
    assert next(batches)[0] == 300
    assert next(validation.iterate(validation.plan, 0, 0))[0] == 0
    assert next(batches)[0] == 305


class Strict(ByEpoch):
    """A data set with a set_epoch of other arguments."""

    def set_epoch(self, epoch: int, rank: int) -> None:  # type: ignore[override]
        """Take both."""


def test_a_set_epoch_that_fails_is_an_error_each_time() -> None:
    """Read sample by sample, as after bad ones, the data would have no epoch in silence."""
    loader = sharded(DataLoader(Strict(), 5))
    for _ in range(2):
        with pytest.raises(TypeError, match="set_epoch"):
            next(loader.iterate(loader.plan, 0, 0))


def test_a_set_epoch_that_is_no_method_is_left_alone() -> None:
    """It is a value of the user's own."""
    data: Any = Numbers()
    data.set_epoch = 3
    assert indices(sharded(DataLoader(data, 5)))


def test_a_sampler_without_length_is_refused() -> None:
    """A sampler must have a length: the number of samples in an epoch must be known."""
    data = DataLoader(Numbers(), 4, sampler=(i for i in range(3)))
    with pytest.raises(
        ConfigError, match=r"^data has a generator without a length; give it a __len__"
    ):
        read_source(data, "data", training=True)


@pytest.mark.parametrize(
    "options", [{"replacement": True}, {"num_samples": 4}, {"replacement": True, "num_samples": 30}]
)
def test_a_random_sampler_that_is_no_permutation_draws_itself(options: dict[str, Any]) -> None:
    """RandomSampler with replacement, or over a part, is a sampler of the user's own."""
    sampler = RandomSampler(Numbers(), **options)
    source = read_source(DataLoader(Numbers(), 4, sampler=sampler), "data", training=True)
    assert source is not None
    assert source.sampler is sampler
    assert source.num_samples == options.get("num_samples", 10)


@pytest.mark.parametrize("training", [True, False])
def test_a_sequential_sampler_of_fewer_items_takes_those_alone(training: bool) -> None:
    """SequentialSampler(range(6)) over ten samples: the other four are held out, not trained on."""
    data = DataLoader(Numbers(), 4, sampler=SequentialSampler(range(6)))
    source = read_source(data, "data", training)
    assert source is not None
    assert source.num_samples == 6
    assert sum(indices(sharded(data)), []) == [0, 1, 2, 3, 4, 5]


def test_a_distributed_sampler_is_refused() -> None:
    """Samples that are already sharded over ranks would be sharded twice."""
    data = DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0))
    with pytest.raises(
        ConfigError, match=r"^train_dataloaders has a DistributedSampler; .*shuffle=True"
    ):
        read_source(data, "train_dataloaders", training=True)


def test_a_loaders_options_are_kept() -> None:
    """Workers, collate function and the rest go over to the loader of the rank."""
    data = DataLoader(
        Numbers(),
        4,
        collate_fn=list,
        num_workers=1,
        prefetch_factor=3,
        timeout=5,
        persistent_workers=True,
        drop_last=True,
    )
    source = read_source(data, "data", training=True)
    assert source is not None
    assert (source.batch_size, source.shuffle, source.drop_last) == (4, False, True)
    made = sharded(data)._loader
    assert made.collate_fn((1, 2)) == [1, 2]
    for name in ("num_workers", "prefetch_factor", "timeout", "persistent_workers"):
        assert getattr(made, name) == getattr(data, name)


@pytest.mark.parametrize("training", [True, False])
def test_a_bare_data_set_is_a_loader_of_single_samples(training: bool) -> None:
    """A Dataset works without a DataLoader: single samples, shuffled only for training."""
    source = read_source(TensorDataset(torch.zeros(3)), "data", training)
    assert source is not None
    assert (source.batch_size, source.shuffle, source.num_samples) == (1, training, 3)


class OwnLoop(DataLoader[Any]):
    """A DataLoader that makes its batches in its own way."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(2)])


@pytest.mark.parametrize(
    "data",
    [
        [torch.zeros(2)],
        iter([torch.zeros(2)]),
        Stream(),
        DataLoader(Stream(), 2),
        DataLoader(Numbers(), batch_size=None),
        DataLoader(Numbers(), batch_sampler=[[0], [1, 2]]),
        DataLoader(
            Numbers(),
            batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(Numbers()), 2, False),
        ),
        OwnLoop(Numbers(), 2),
    ],
)
def test_batches_of_the_users_own_making_are_a_stream(data: Any) -> None:
    """If sizes or order of the batches are unknown, the data is a stream."""
    assert read_source(data, "data", training=True) is None


def test_what_is_no_data_is_refused() -> None:
    """Something that cannot be iterated is refused by its name."""
    with pytest.raises(
        ConfigError, match=r"^val_dataloaders is of type int; it must be a DataLoader"
    ):
        read_source(3, "val_dataloaders", training=False)


@pytest.mark.parametrize(
    "data", [TensorDataset(torch.zeros(0)), DataLoader(Numbers(3), 2, sampler=[])]
)
def test_an_empty_data_set_is_refused(data: Any) -> None:
    """Data without samples is an error from the start."""
    with pytest.raises(DataError, match=r"^train_dataloaders: the data set has no samples"):
        read_source(data, "train_dataloaders", training=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_samples_error_keeps_its_words(num_workers: int) -> None:
    """An error that a data set raises on purpose reaches the user in its own words,
    also from a worker.
    """
    with pytest.raises(DataError, match=r"^sample 0 is no image: give another file\.$"):
        indices(sharded(DataLoader(Broken(), 4, num_workers=num_workers)))


def test_a_worker_that_is_just_ending_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's memory is fetched from the worker that made it. A process that is killed closes its
    sockets before its end can be seen, and torch looks once: here it looks too early. (Its handler
    of SIGCHLD, which names the worker too, may come later still: here it never comes.)
    """
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    loader = sharded(DataLoader(Numbers(40), 4, num_workers=1))
    batches = loader.iterate(loader.plan, 0, 0)
    next(batches)
    of_torch = inspect.getgeneratorlocals(batches)["batches"]  # type: ignore[arg-type]
    while of_torch._data_queue.empty():
        time.sleep(0.01)
    worker = of_torch._workers[0]
    worker.kill()
    worker.join()
    looks = iter([True])
    monkeypatch.setattr(worker, "is_alive", lambda: next(looks, False))
    with pytest.raises(
        RuntimeError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly$"
    ):
        next(batches)
    signal.signal(signal.SIGCHLD, before)


def no_file(samples: list[Any]) -> Any:
    """Fail as one that reads a table beside the samples would."""
    raise FileNotFoundError("labels.csv")


def test_a_workers_own_error_of_a_file_stays_one() -> None:
    """It is no worker's end, though a loader may end its worker after it."""
    loader = DataLoader(Numbers(), 4, num_workers=1, collate_fn=no_file)
    with pytest.raises(FileNotFoundError, match=r"labels\.csv"):
        indices(sharded(loader))


class Jittered(TensorDataset):
    """Tensors with random numbers added."""

    def __getitem__(self, index: Any) -> Any:
        return (super().__getitem__(index)[0] + torch.rand(()),)


def test_tensors_with_augmentation_draw_from_seed_epoch_and_index() -> None:
    """A data set that is built on torch's tensors is seeded sample by sample,
    as any other of the user's.
    """
    source = read_source(DataLoader(Jittered(torch.zeros(8)), 4), "data", training=True)
    plan = StepPlan(8, 4, 1)

    def drawn(epoch: int) -> list[float]:
        torch.rand(3)  # other draws do not matter
        loader = ShardedLoader(source, plan, 0, 0, list)
        return [float(x) for (batch,) in loader.iterate(plan, epoch, 0) for x in batch]

    assert drawn(0) == drawn(0)
    assert len({*drawn(0), *drawn(1)}) == 16


def test_a_samplers_own_generator_draws_again_what_it_drew(tmp_path: Path) -> None:
    """A run that resumes behind its first epoch meets the order of
    the run that never stopped; epochs differ.
    """

    def data() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return loader(23, sampler=WeightedRandomSampler(torch.ones(23), 23, generator=generator))

    orders: list[list[float]] = []

    class Seen(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            orders[-1].extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            orders.append([])

    whole, rest = Seen(), Seen()
    quiet(tmp_path / "whole", max_steps=12).fit(whole, data())
    assert orders[0] != orders[1]
    quiet(tmp_path / "parts", max_steps=8, enable_checkpointing=True).fit(Seen(), data())
    quiet(tmp_path / "parts", max_steps=12, enable_checkpointing=True).fit(
        rest, data(), ckpt_path="last"
    )
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_sampler_of_torchs_is_what_batch_size_and_shuffle_are(
    tmp_path: Path, drop_last: bool
) -> None:
    """Handed in or made by the DataLoader: the same run."""
    data, ends = rows(23), []
    for given in (
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last)),
        DataLoader(data, 4, shuffle=True, drop_last=drop_last),
    ):
        task = Line()
        trainer = quiet(tmp_path, max_epochs=1)
        trainer.fit(task, given)
        ends.append(weights(task))
        assert trainer.global_step == (5 if drop_last else 6)
    assert torch.equal(*ends)


class Drawn(IterableDataset[Any]):
    """A stream that draws in its workers."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(20):
            yield torch.randn(3), torch.zeros(1)


def test_workers_that_a_stream_keeps_are_seeded_by_epoch_and_ended(tmp_path: Path) -> None:
    """A run that resumes behind an epoch draws what the run that never stopped did;
    no worker outlives the fit.
    """

    def fit(folder: str, steps: int, **options: Any) -> Tensor:
        task, data = Line(), DataLoader(Drawn(), 4, num_workers=1, persistent_workers=True)
        quiet(tmp_path / folder, max_steps=steps, enable_checkpointing=True).fit(
            task, data, **options
        )
        assert data._iterator is None
        for worker in set(multiprocessing.active_children()) - others:
            worker.join(20)  # of 60 s that a worker lives on for if it is ended by a signal alone
            assert not worker.is_alive()
        return weights(task)

    others = set(multiprocessing.active_children())  # of tests before this one

    whole = fit("whole", 8)
    fit("parts", 6)
    assert torch.equal(fit("parts", 8, ckpt_path="last"), whole)


@pytest.mark.parametrize(
    "data", [{"a": rows(8), "b": rows(8)}, [loader(8), rows(8)]], ids=["dict", "mixed"]
)
def test_several_data_sets_are_refused_by_name(data: Any, tmp_path: Path) -> None:
    """They are no stream of batches."""
    with pytest.raises(
        ConfigError,
        match=(
            r"train_dataloaders is a (dict|list) of (DataLoader|TensorDataset)s. Give DataLoaders"
        ),
    ):
        quiet(tmp_path).fit(Line(), data)


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_stateful_loader_is_a_dataloader(shuffle: bool) -> None:
    """A StatefulDataLoader is sharded,
    shuffled and resumed as a DataLoader with the same arguments.
    """
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    read = [
        read_source(kind(Numbers(), 3, shuffle=shuffle), "data", True)
        for kind in (DataLoader, stateful)
    ]
    plain, own = (source for source in read if source is not None)
    facts = [
        (s.batch_size, s.shuffle, s.drop_last, s.sampler, s.num_samples, s.options["num_workers"])
        for s in (plain, own)
    ]
    assert facts[0] == facts[1]


def test_a_loader_without_order_is_refused() -> None:
    """With in_order=False batches would come as workers finish; here it would have no effect."""
    data = DataLoader(rows(8), 4, num_workers=1, in_order=False)
    with pytest.raises(ConfigError, match=r"val_dataloaders has in_order=False; .* Leave it out"):
        read_source(data, "val_dataloaders", training=False)


def test_a_generator_that_does_not_shuffle_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order is the run's own; a sampler of one's own, and no shuffling, need no such line."""
    said = "the order is not drawn from the loader's generator, but from seed=0"
    for options, count in (
        ({"shuffle": True}, 1),
        ({}, 0),
        ({"sampler": SubsetRandomSampler([1, 3], generator=torch.Generator())}, 0),
    ):
        data: Any = DataLoader(rows(8), 4, generator=torch.Generator(), **options)
        quiet(tmp_path).fit(Line(), data)
        assert capsys.readouterr().out.count(said) == count
