"""Several training loaders as one:
the batches of each mode, on any number of ranks, loaded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

import trainkit
from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.data import combined
from trainkit.data.combined import CombinedLoader
from trainkit.data.streams import SplitStream
from trainkit.errors import ConfigError, DataError


class Numbers(Dataset[Any]):
    """The numbers from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.first + index)])


class Flow(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(i)]) for i in range(200, 205)])


class Seen(Line):
    """Keeps the batches of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the numbers of the batch."""
        self.batches.append((self.global_step, plain(batch)))
        return self.model.weight.sum()


def plain(batch: Any) -> Any:
    """Return a batch with lists in place of tensors."""
    if isinstance(batch, Tensor):
        return batch.flatten().int().tolist()
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return None if batch is None else [plain(part) for part in batch]


def two(a: int = 4, b: int = 10, **options: Any) -> dict[str, DataLoader[Any]]:
    """Return loaders of two batches and of five."""
    return {
        "a": DataLoader(Numbers(0, a), 2, **options),
        "b": DataLoader(Numbers(100, b), 2, **options),
    }


def trained(
    data: Any, tmp_path: Path, ranks: int = 1, epochs: int = 1, **settings: Any
) -> list[Any]:
    """Return the batches of a fit, in the order of steps and ranks."""

    def work(engine: Any) -> list[Any]:
        task = Seen()
        quiet(tmp_path, engine=engine, max_epochs=epochs, **settings).fit(task, data())
        return task.batches

    found = World(ranks).run(work)
    return [
        batch
        for _, _, batch in sorted(
            (step, rank, batch) for rank, own in enumerate(found) for step, batch in own
        )
    ]


MODES = {
    "min_size": [{"a": [0, 1], "b": [100, 101]}, {"a": [2, 3], "b": [102, 103]}],
    "max_size_cycle": [
        {"a": [0, 1], "b": [100, 101]},
        {"a": [2, 3], "b": [102, 103]},
        {"a": [0, 1], "b": [104, 105]},
        {"a": [2, 3], "b": [106, 107]},
        {"a": [0, 1], "b": [108, 109]},
    ],
    "max_size": [
        {"a": [0, 1], "b": [100, 101]},
        {"a": [2, 3], "b": [102, 103]},
        *({"a": None, "b": [i, i + 1]} for i in (104, 106, 108)),
    ],
    "sequential": [[0, 1], [2, 3], *([i, i + 1] for i in (100, 102, 104, 106, 108))],
}


class Noise(Numbers):
    """Random numbers."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1) * 1e6


def test_a_shorter_loader_that_begins_again_draws_new_numbers(tmp_path: Path) -> None:
    """Its few samples are other ones each time, as in a plain loop."""
    data = {"a": DataLoader(Noise(0, 2), 2), "b": DataLoader(Noise(0, 8), 2)}
    seen = [batch["a"] for batch in trained(lambda: data, tmp_path)]
    assert len(seen) == 4 and len({tuple(batch) for batch in seen}) == 4


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_the_batches_of_a_mode(mode: Any, ranks: int, tmp_path: Path) -> None:
    """Iterated by itself and in a fit, where ranks share them in turn."""
    assert [plain(batch) for batch in CombinedLoader(two(), mode)] == MODES[mode]
    assert len(CombinedLoader(two(), mode)) == len(MODES[mode])
    assert (
        trained(lambda: CombinedLoader(two(), mode), tmp_path, ranks, accumulate_grad_batches=1)
        == MODES[mode]
    )


@pytest.mark.parametrize("mode", list(MODES))
def test_a_stream_among_them(mode: Any, tmp_path: Path) -> None:
    """The same modes with a stream in place of the second loader."""

    def data() -> CombinedLoader:
        return CombinedLoader([two()["a"], DataLoader(Flow(), 2)], mode)

    alone = [plain(batch) for batch in data()]
    assert trained(data, tmp_path) == alone
    assert trained(data, tmp_path, ranks=2, accumulate_grad_batches=1) == alone
    assert len(alone) == {"min_size": 2, "max_size_cycle": 3, "max_size": 3, "sequential": 5}[mode]


class Prefetched(DataLoader[Any]):
    """A loader with an iterator of its own, which changes the batches."""

    def _get_iterator(self) -> Any:
        return (batch + 0.5 for batch in super()._get_iterator())


@pytest.mark.parametrize("joined", [dict, CombinedLoader])
def test_a_loaders_own_iterator_makes_its_batches(joined: Any) -> None:
    """Also that of a `_get_iterator`: read from the samplers' indices, it would be left out."""
    loaders = joined({"a": DataLoader(Numbers(0, 4), 2), "b": Prefetched(Numbers(0, 4), 2)})
    stream = SplitStream(combined.joined(loaders, "data"), None, 2, 7, (0, 1), 1, list)
    (batch,) = next(stream.steps(0, 0, 1))
    assert [batch["a"].tolist(), batch["b"].tolist()] == [[[0], [1]], [[0.5], [1.5]]]


def test_a_dict_or_a_list_of_loaders_cycles_the_shorter(tmp_path: Path) -> None:
    """As in Lightning, whether passed to fit or returned by train_dataloader."""
    assert trained(two, tmp_path) == MODES["max_size_cycle"]
    assert trained(lambda: list(two().values()), tmp_path)[0] == [[0, 1], [100, 101]]


def test_shuffled_loaders_have_an_order_for_each_epoch_and_seed(tmp_path: Path) -> None:
    """All samples of the longest once an epoch, the same with workers."""

    def data(workers: int = 0) -> Any:
        return lambda: two(shuffle=True, num_workers=workers)

    once = trained(data(), tmp_path, epochs=2)
    assert once == trained(data(workers=1), tmp_path, epochs=2)
    assert once[:5] != once[5:]
    for epoch in (once[:5], once[5:]):
        assert sorted(i for batch in epoch for i in batch["b"]) == [*range(100, 110)]
    assert once != trained(data(), tmp_path, epochs=2, seed=1)


def test_each_loader_has_its_own_collate(tmp_path: Path) -> None:
    """And a bad sample of one is skipped."""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 3:
                raise OSError("broken")
            return super().__getitem__(index)

    def data() -> dict[str, Any]:
        other = DataLoader(Broken(100, 10), 2, collate_fn=lambda samples: torch.stack(samples) + 1)
        return {"a": two()["a"], "b": other}

    found = trained(data, tmp_path, on_bad_sample="skip")
    assert found[:2] == [{"a": [0, 1], "b": [101, 102]}, {"a": [2, 3], "b": [103]}]


def note(worker: int) -> None:
    """Set an attribute of the loader's data set."""
    info: Any = get_worker_info()
    info.dataset.noted = 10 * info.dataset.first


class Noted(Numbers):
    """Numbers that need the worker_init_fn."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.noted  # type: ignore[attr-defined]


def test_a_worker_init_fn_has_its_own_loaders_data_set() -> None:
    """Of several loaders each function sees the data set of its own."""
    plain = DataLoader(Numbers(1, 4), 2)
    loaders = [
        DataLoader(Noted(1000 * n, 4), 2, num_workers=1, worker_init_fn=note) for n in (5, 7)
    ]
    data = CombinedLoader([plain, *loaders]).joined("data")
    stream = SplitStream(data, None, None, 7, (0, 1), 1, list)
    (batch,) = next(stream.steps(0, 0, 1))
    assert [int(part[0]) for part in batch] == [1, 55_000, 77_000]


def test_the_gradient_is_that_of_all_ranks(tmp_path: Path) -> None:
    """Weights of 1 and 3 ranks are equal with the same global batch."""

    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(functional.mse_loss(self(x), y) for x, y in batch.values())

    def fitted(engine: Any, accumulate: int) -> Tensor:
        task = Both()
        data = {"near": loader(24), "far": loader(36)}
        settings = {"accumulate_grad_batches": accumulate, "lr_scaling": "none", "max_epochs": 2}
        quiet(tmp_path, engine=engine, **settings).fit(task, data)
        return weights(task)

    (one,) = World(1).run(lambda engine: fitted(engine, 3))
    for three in World(3).run(lambda engine: fitted(engine, 1)):
        assert torch.allclose(one, three, atol=1e-6)


def test_evaluation_takes_a_combined_loader(tmp_path: Path) -> None:
    """Sequential ones are the loaders one after the other, as a dict of them is."""

    class Counted(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val/first", (batch["a"] if isinstance(batch, dict) else batch).mean())

    data = {"a": DataLoader(Numbers(0, 4), 2), "b": DataLoader(Numbers(100, 10), 2)}
    values = quiet(tmp_path).validate(Counted(), CombinedLoader(data, "sequential"))
    assert values == {"val/first/a": 1.5, "val/first/b": 104.5}
    assert quiet(tmp_path).validate(Counted(), CombinedLoader(data, "min_size")) == {
        "val/first": 1.5
    }


def test_what_cannot_be_combined(tmp_path: Path) -> None:
    """Errors name the key, the value and what is legal."""
    with pytest.raises(
        ConfigError, match="mode is 'largest'; it must be one of min_size, max_size_cycle"
    ):
        CombinedLoader(two(), "largest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a dict or a list of loaders"):
        trainkit.CombinedLoader([])
    with pytest.raises(ConfigError, match="DistributedSampler; trainkit shards"):
        trained(
            lambda: [
                two()["a"],
                DataLoader(Numbers(0, 4), sampler=DistributedSampler(Numbers(0, 4), 2, 0)),
            ],
            tmp_path,
        )
    with pytest.raises(ConfigError, match="Give DataLoaders"):
        trained(lambda: {"a": Numbers(0, 2), "b": Numbers(0, 2)}, tmp_path)
    with pytest.raises(DataError, match="loader 0 yields no batch when it is iterated again"):
        trained(
            lambda: CombinedLoader([iter([torch.ones(1)]), two()["b"]], "max_size_cycle"), tmp_path
        )
