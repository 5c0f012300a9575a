"""Monitors on two ranks: they stop together, and write only on rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.starts import Starts, line_of

STARTS = ["single", "horovod", "ddp"]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(lambda start: line_of(start, 2, "monitors.py") + " {out}", tmp_path_factory)


@pytest.mark.parametrize("start", STARTS)
def test_a_spike_of_one_rank_stops_all(start: str, results: Any) -> None:
    """The rank that detects it reports it; all end at the same step with the reason."""
    ranks = results[start]["spike"]
    last = len(ranks) - 1
    for rank, own in enumerate(ranks):
        assert [step for step, _, _ in own["spikes"]] == ([6] if rank == last else [])
        assert own["step"] == 8
        assert own["reason"] == f"loss spike on rank {last} at step 6: 50, usually 1.01"
    assert results.output[start].count("Loss spike on rank") == 1


@pytest.mark.parametrize("start", STARTS)
def test_time_ends_all_ranks_at_one_step(start: str, results: Any) -> None:
    """The clock is rank 0's, independent of the others', and the same seconds are saved on all."""
    ranks = results[start]["timer"]
    assert all(own == ranks[0] for own in ranks)
    assert ranks[0]["reason"].startswith("the time limit is reached:")
    assert 0.8 <= ranks[0]["kept"]["time_elapsed"] < 60


@pytest.mark.parametrize("start", STARTS)
def test_numbers_are_written_on_rank_0_alone(start: str, results: Any) -> None:
    """Rates count the samples of all ranks, the step with a single sample too."""
    ranks = results[start]["written"]
    rows = ranks[0]["rows"]
    names = {name for _, values in rows for name in values}
    assert {"throughput/items_per_s", "lr-SGD", "grad_norm/total", "update_ratio/total"} <= names
    for _, values in rows:
        if "throughput/items_per_s" in values:
            assert values["throughput/items_per_s"] == pytest.approx(
                10 * values["throughput/samples_per_s"]
            )
    for own in ranks[1:]:
        assert not [
            values
            for _, values in own["rows"]
            if any("/" in name and "train/" not in name for name in values)
        ]
