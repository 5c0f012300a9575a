"""Audits at two and three ranks: a rank that computes wrong numbers is named, and no other."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.starts import Starts, line_of

STARTS = [("horovod", 2), ("ddp", 3)]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(lambda start: line_of(*start, "audit.py") + " {out}", tmp_path_factory)


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_an_audited_fit_is_the_same_fit(start: tuple[str, int], results: Starts) -> None:
    """Each step is audited: weights, metric objects and counters are those without an audit,
    though dropout, noise, batch norm and counters take part.
    """
    assert all(rank["error"] is None for rank in results[start]["accumulated"])
    for plain, audited in zip(results[start]["plain"], results[start]["audited"], strict=True):
        assert audited["error"] is None
        assert torch.equal(plain["weights"], audited["weights"])
        assert (plain["metric"], plain["calls"]) == (audited["metric"], audited["calls"])


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("activation", "the output of model.0"),
        ("gradient", "the gradient of model.0.weight"),
        ("weight", "the weight model.0.weight"),
    ],
)
def test_most_ranks_decide(fault: str, first: str, results: Starts) -> None:
    """A flipped bit of the last of three ranks is named with what differs first, on all ranks."""
    for rank in results["ddp", 3][fault]:
        assert "Audit at step 2: rank 2 (host " in rank["error"]
        assert f"in a microbatch of rank 0, first in {first}; no audit before" in rank["error"]


@pytest.mark.parametrize("fault", ["activation", "gradient", "weight"])
def test_two_ranks_cannot_decide_for_good(fault: str, results: Starts) -> None:
    """Both are named if neither is confirmed by the other."""
    for rank in results["horovod", 2][fault]:
        assert "rank 0 (host " in rank["error"]
        assert "and rank 1 (host " in rank["error"]
        assert "three ranks or more would decide" in rank["error"]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_what_was_wrong_once_is_named(start: tuple[str, int], results: Starts) -> None:
    """The audited rank's recorded step differs from what all ranks, itself included, compute."""
    for rank in results[start]["once"]:
        assert "Audit at step 2: rank 0 (host " in rank["error"]
        assert "first in the output of model.0" in rank["error"]
        assert "It was once" in rank["error"]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_a_warning_lets_the_run_continue(start: tuple[str, int], results: Starts) -> None:
    """The run reaches its end, and rank 0 has said it."""
    assert all(rank["error"] is None for rank in results[start]["warned"])
    assert "Audit at step 2: rank" in results.output[start]
