"""Guards of a step, and exactness over ranks, at 2 and 3 ranks on both engines."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.toy import Line, rows
from tests.parallel.starts import Starts, line_of

STARTS = [("horovod", 2), ("ddp", 2), ("horovod", 3), ("ddp", 3)]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(
        lambda start: line_of(*start, "guards.py") + f" {{out}} {start[1]}", tmp_path_factory
    )


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Hold two results of float64 against each other."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize("scenario", ["roomy", "accumulation_by_epoch", "overfit"])
def test_ranks_equal_one_process(start: tuple[str, int], scenario: str, results: Starts) -> None:
    """Short steps, accumulation by epoch and overfitting:
    every rank ends with the single process's weights.
    """
    expected = results["single", start[1]][scenario][0]["weights"]
    for rank in results[start][scenario]:
        same(rank["weights"], expected)


@pytest.mark.parametrize("start", [("single", 2), *STARTS], ids=str)
def test_a_rank_out_of_memory_makes_all_split(start: tuple[str, int], results: Starts) -> None:
    """The weights and counts are those of a run with room enough, wherever memory ended."""
    for rank in results[start]["out_of_memory"]:
        same(rank["weights"], results["single", start[1]]["roomy"][0]["weights"])
        assert rank["seen"] == 8 * start[1] + 3
    deep = [rank["weights"] for rank in results[start]["out_of_memory_in_backward"]]
    for own in deep:
        same(own, results["single", start[1]]["out_of_memory_in_backward"][0]["weights"])
    said = (
        f"Out of memory on rank {0 if start[0] == 'single' else start[1] - 1}: all ranks split each"
        " microbatch into 2"
    )
    assert results.output[start].count(said) == 3, results.output[start]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_all_ranks_end_before_a_poisoned_update(start: tuple[str, int], results: Starts) -> None:
    """All ranks raise the same error, which names step, rank and samples; no weight has moved."""
    last = start[1] - 1
    samples = ", ".join(str(8 * start[1] - 4 + i) for i in range(4))
    for rank in results[start]["not_finite"]:
        assert rank["error"].startswith(
            "DivergenceError: The loss is not finite at step 1 (epoch 0): "
        )
        assert (
            f"nan on rank {last}, samples {samples} of the data set. The weights" in rank["error"]
        )
        same(rank["weights"], rank["before"])


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_a_flipped_bit_is_found_and_repaired(start: tuple[str, int], results: Starts) -> None:
    """The first tensor and the rank are named;
    a repair makes all ranks equal to one that was never damaged.
    """
    suspect = start[1] - 1
    for rank in results[start]["divergence"]:
        assert rank["plain"]["error"] is None
        assert (
            f"At step 2 ranks no longer hold the same model: 'model.weight' of rank {suspect}"
            in rank["stopped"]["error"]
        )
        assert rank["repaired"]["error"] is None
        assert rank["repairs"] == 1
        assert torch.equal(rank["repaired"]["weights"], rank["plain"]["weights"])


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_metric_objects_are_exact(start: tuple[str, int], results: Starts) -> None:
    """A torchmetrics value is that of all samples, also if ranks have no batch."""
    for rank in results[start]["metric_objects"]:
        for kind in ("many", "few"):
            expected = results["single", start[1]]["metric_objects"][0][kind]
            assert rank[kind] == {
                name: pytest.approx(value, rel=1e-6) for name, value in expected.items()
            }
            assert rank[kind]["object"] == pytest.approx(rank[kind]["plain"], rel=1e-6)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_written_predictions_are_in_order(start: tuple[str, int], results: Starts) -> None:
    """The files of all ranks give the data set's order."""
    task = Line().double()
    expected = task(rows(8 * start[1] + 3).tensors[0].double()).detach()
    for rank in results[start]["predictions"]:
        assert torch.equal(rank["kept"], rank["read"])
        same(rank["read"], expected)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_batch_norm_over_all_ranks(start: tuple[str, int], results: Starts) -> None:
    """Weights, running statistics and validation are those of one process
    that takes the ranks' microbatches as one.
    """
    (whole,) = results["single", start[1]]["sync_batchnorm"]
    for rank in results[start]["sync_batchnorm"]:
        assert rank["state"].keys() == whole["state"].keys()
        for name, value in whole["state"].items():
            same(rank["state"][name], value)
        assert rank["metrics"] == {
            name: pytest.approx(value, rel=1e-9) for name, value in whole["metrics"].items()
        }
        assert "the last step of an epoch has 1 samples" in rank["refused"]
        assert (
            "trainer.sync_batchnorm and trainer.halve_batch_on_oom are both true"
            in rank["together"]
        )
    said = "trainer.sync_batchnorm is true, and Line has no batch norm: it changes nothing."
    assert results.output[start].count(said) == 1


def test_a_gather_of_one_rank_alone_is_named(results: Starts) -> None:
    """It meets another one of the other ranks; all of them say where each was called."""
    for rank in results["ddp", 2]["called_alone"]:
        assert re.match(
            r"EngineError: Ranks exchange different things: rank 0 at guards\.py, line \d+ and rank 1"
            r" at guards\.py, line \d+\. Something that needs all ranks was called on some of them",
            str(rank["error"]),
        )
