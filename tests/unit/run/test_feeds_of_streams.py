"""Streams of several ranks with different batches:
one contract for all, or a refusal, but never one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.data import streams
from trainkit.data.streams import sharded
from trainkit.errors import ConfigError

x_NI, y_NO = rows(20).tensors
UNLIKE: dict[str, list[list[Any]]] = {
    "other sizes": [[(x_NI[:8], y_NO[:8])], [(x_NI[8:10], y_NO[8:10])]],
    "nothing on one rank": [[(x_NI[:8], y_NO[:8])], []],
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_ranks_of_unlike_streams_share_one_contract(data: list[list[Any]], tmp_path: Path) -> None:
    """The batch is unknown then: the factor is that of the ranks,
    and all ranks keep the same weights.
    """

    def work(engine: ThreadEngine) -> tuple[torch.Tensor, float, int | None]:
        task, trainer = Line(), quiet(tmp_path, engine=engine)
        trainer.fit(task, sharded(data[engine.place]))
        return weights(task), trainer.batch_plan.lr_factor, trainer.batch_plan.batch_size

    first, second = World(2).run(work)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:] == (2, None)


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("setting", ["global_batch_size", "lr_reference_batch_size"])
def test_what_needs_a_known_batch_is_refused(
    data: list[list[Any]], setting: str, tmp_path: Path
) -> None:
    """A setting that needs a known batch size is refused on all ranks alike."""

    def work(engine: ThreadEngine) -> str:
        with pytest.raises(ConfigError) as error:
            quiet(tmp_path, engine=engine, **{setting: 16}).fit(Line(), sharded(data[engine.place]))
        return str(error.value)

    said = World(2).run(work)
    assert said[0] == said[1]
    assert "of unknown size" in said[0]


def test_different_streams_are_not_split(tmp_path: Path) -> None:
    """If the ranks' first batches differ, the batches of one stream cannot be split:
    refused on all ranks alike.
    """

    def work(engine: ThreadEngine) -> str:
        with pytest.raises(ConfigError) as error:
            quiet(tmp_path, engine=engine).fit(Line(), UNLIKE["other sizes"][engine.place])
        return str(error.value)

    said = World(2).run(work)
    assert said[0] == said[1]
    assert "the ranks read different streams" in said[0]
    assert "trainkit.sharded" in said[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_unequal_shares_train_as_one_rank_does(ranks: int, tmp_path: Path) -> None:
    """A list of batches on N ranks gives the weights of one rank
    that accumulates N of them in a step.
    """
    batches = [(x_NI[i : i + 2], y_NO[i : i + 2]) for i in range(0, 20, 2)]

    def work(engine: ThreadEngine) -> torch.Tensor:
        task = Line()
        quiet(tmp_path, engine=engine, lr_scaling="none").fit(task, batches)
        return weights(task)

    alone = Line()
    quiet(tmp_path, lr_scaling="none", accumulate_grad_batches=ranks).fit(alone, batches)
    for found in World(ranks).run(work):
        torch.testing.assert_close(found, weights(alone), rtol=0, atol=1e-12)


class Endless:
    """A batch sampler without an end, and without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(20, (2,)).tolist()


def loader_of(batches: Any) -> DataLoader[Any]:
    """Return a loader with a batch sampler."""
    return DataLoader(rows(20), batch_sampler=batches)


def test_a_batch_sampler_without_end_is_drawn_up_to_the_limit(tmp_path: Path) -> None:
    """An epoch has as many batches as trainer.limit_train_batches says."""
    task, trainer = Line(), quiet(tmp_path, max_epochs=2, limit_train_batches=3)
    trainer.fit(task, loader_of(Endless()))
    assert task.global_step == 6


@pytest.mark.timeout(60)
def test_a_batch_sampler_without_length_ends_or_needs_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends is drawn whole, as torch does; one without end is refused before a step."""

    class Some:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3], [4]])

    task, trainer = Line(), quiet(tmp_path / "some", max_epochs=2)
    trainer.fit(task, loader_of(Some()))
    assert task.global_step == 6
    monkeypatch.setattr(streams, "_ENDLESS", 1000)
    with pytest.raises(
        ConfigError, match=r"A Endless has drawn 1,000 batches, .*limit_train_batches"
    ):
        quiet(tmp_path / "endless", max_steps=2).fit(Line(), loader_of(Endless()))


class Flow(IterableDataset[Any]):
    """Samples in a random order."""

    def __iter__(self) -> Iterator[Any]:
        for place in torch.randperm(20).tolist():
            yield x_NI[place], y_NO[place]


OVERFIT: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"a": loader(20, batch_size=2, shuffle=True), "b": loader(6, batch_size=2)},
    "its own batches": lambda: loader_of(Endless()),
    "a stream": lambda: DataLoader(Flow(), 2),
    "a combined stream": lambda: {"a": DataLoader(Flow(), 2), "b": loader(6, shuffle=True)},
}


@pytest.mark.parametrize("kind", OVERFIT)
def test_overfitting_takes_the_same_batches_of_a_stream(kind: str, tmp_path: Path) -> None:
    """trainer.overfit_batches: each epoch has the batches of the first."""
    seen: list[Any] = []

    class Seen(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = batch.values() if isinstance(batch, dict) else [batch]
            seen.append([part[0].tolist() for part in parts])
            return self.model.weight.sum()

    quiet(tmp_path, max_epochs=3, overfit_batches=2).fit(Seen(), OVERFIT[kind]())
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]
    assert seen[0] != seen[1]
