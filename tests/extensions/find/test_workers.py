"""find workers: each setting is measured on real steps, and the cheapest that is fast is chosen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, Numbered, Numbers, loader, quiet, weights
from trainkit.errors import ConfigError
from trainkit.extensions.find.workers import Loading, enough, find_workers
from trainkit.run.data_sources import DataSources


def test_the_fewest_workers_that_are_fast_are_chosen() -> None:
    """Within a twentieth of the fastest; of as many workers the least prefetch."""
    one, two, four = Loading(1, 2, 50.0, 0.5), Loading(2, 2, 96.0, 0.1), Loading(4, 2, 100.0, 0.0)
    assert enough([Loading(0, 0, 20.0, 0.8), one, two, four]) == two
    assert enough([one, Loading(1, 4, 51.0, 0.4), Loading(1, 8, 60.0, 0.3)]).prefetch == 8
    assert enough([Loading(0, 0, 99.0, 0.1), four]).workers == 0


class SlowToRead(Numbered):
    """Each sample takes longer than a step."""

    def __getitem__(self, index: int) -> Any:
        """Wait for a disk."""
        time.sleep(0.005)
        return super().__getitem__(index)


class SlowToTrain(Line):
    """Each step takes longer than its data."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Wait for a device."""
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


def test_a_rank_that_never_waits_needs_no_other_setting(tmp_path: Path) -> None:
    """It stops where a twentieth of a step or less is left to gain: the answer is clear."""
    options = quiet(tmp_path, max_epochs=1).options
    tried, _ = find_workers(
        SlowToTrain(), DataSources({"train": loader(64, 8)}), options, steps=3, most=4
    )
    assert [(one.workers, one.is_fed) for one in tried] == [(0, True)]


def test_slow_steps_are_measured_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting gets its seconds, and three steps at least."""
    monkeypatch.setattr("trainkit.extensions.find.workers._MOST_S", 0.9)
    task, options = SlowToTrain(), quiet(tmp_path, max_epochs=1).options
    start = time.perf_counter()
    find_workers(task, DataSources({"train": loader(512, 8)}), options, steps=50, most=0)
    assert time.perf_counter() - start < 50 * 0.2


@pytest.mark.parametrize(("most", "counts"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_each_setting_is_trained_with(most: int, counts: list[int], tmp_path: Path) -> None:
    """In real worker processes; task,
    random numbers and the loader's generator stay as they are.
    """
    generator = torch.Generator().manual_seed(4)
    data = loader(
        SlowToRead(64),
        8,
        shuffle=True,
        generator=generator,
        num_workers=2,
        persistent_workers=True,
        timeout=60,
    )
    task, numbers = Numbers(), torch.get_rng_state()
    before, state = weights(task), generator.get_state()
    options = quiet(tmp_path / "run", max_epochs=1).options
    found, ranks = find_workers(task, DataSources({"train": data}), options, steps=3, most=most)
    assert ranks == 1 and [one.workers for one in found if one.prefetch <= 2] == counts
    assert all(one.samples_per_s > 0 and 0 <= one.data_share <= 1 for one in found)
    assert torch.equal(before, weights(task)) and torch.equal(numbers, torch.get_rng_state())
    assert torch.equal(state, generator.get_state()) and not (tmp_path / "run").exists()


def test_data_without_workers_is_refused(tmp_path: Path) -> None:
    """A list of batches, and a stream, have none."""
    options = quiet(tmp_path, max_epochs=1).options
    given: Any = list(loader())
    with pytest.raises(
        ConfigError, match="The training data is a list, which has no loader workers"
    ):
        find_workers(Line(), DataSources({"train": given}), options, most=0)
