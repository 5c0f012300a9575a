"""BasePredictionWriter: a user's own way to write predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import ConfigError, TaskError


class Writer(trainkit.BasePredictionWriter):
    """Keeps what it is asked to write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batches: list[tuple[list[int], int]] = []
        self.ends: list[tuple[int, list[list[int]]]] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        task: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep places and sizes."""
        assert torch.equal(prediction, task(batch[0]))
        self.batches.append((list(batch_indices), batch_idx))

    def write_on_epoch_end(
        self, trainer: Any, task: Any, predictions: Sequence[Any], batch_indices: Any
    ) -> None:
        """Keep the number of batches, and places."""
        self.ends.append((len(predictions), [list(places) for places in batch_indices[0]]))


@pytest.mark.parametrize(
    ("interval", "batches", "ends"), [("batch", 3, 0), ("epoch", 0, 1), ("batch_and_epoch", 3, 1)]
)
def test_predictions_are_handed_over_with_their_places(
    interval: str, batches: int, ends: int, tmp_path: Path
) -> None:
    """Each batch comes with the places of its samples; at the end all of them come."""
    writer = Writer(write_interval=interval)
    quiet(tmp_path, callbacks=writer).predict(Line(), loader(10), return_predictions=False)
    places = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert writer.batches == list(zip(places, range(3), strict=True))[:batches]
    assert writer.ends == [(3, places)][:ends]


def test_each_rank_writes_its_own_batches(tmp_path: Path) -> None:
    """Over the ranks each sample is written once."""

    def work(engine: ThreadEngine) -> list[int]:
        writer = Writer()
        quiet(tmp_path, callbacks=writer, engine=engine).predict(Line(), loader(10))
        return [place for places, _ in writer.batches for place in places]

    assert sorted(place for own in World(2).run(work) for place in own) == list(range(10))


def test_a_missing_method_is_named(tmp_path: Path) -> None:
    """The method of the interval must be defined, and the interval one of three."""
    with pytest.raises(
        TaskError,
        match=r"BasePredictionWriter has no write_on_batch_end\(\), and write_interval is 'batch'",
    ):
        quiet(tmp_path, callbacks=trainkit.BasePredictionWriter()).predict(Line(), loader(4))
    with pytest.raises(
        ConfigError, match=r"write_interval is 'step'; it must be one of 'batch', 'epoch'"
    ):
        trainkit.BasePredictionWriter("step")  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_the_interval_says_when_it_writes(interval: Any) -> None:
    """By Lightning's names, which a subclass with an on_predict_epoch_end of its own reads."""
    writer = trainkit.BasePredictionWriter(interval)
    assert writer.interval == interval
    when = writer.interval.on_batch, writer.interval.on_epoch
    assert when == ("batch" in interval, "epoch" in interval)
