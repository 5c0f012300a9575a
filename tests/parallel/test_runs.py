"""Whole runs on two ranks: restarts, ranks without samples, samplers, full disks,
stops and errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import run_command
from tests.helpers.toy import Line, rows, weights
from tests.parallel.starts import ROOT, Starts, line_of

STARTS = ["single", "horovod", "ddp"]

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(lambda start: line_of(start, 2, "runs.py") + " {out}", tmp_path_factory)


@pytest.mark.parametrize("start", STARTS)
def test_resuming_changes_no_bit_on_any_rank(start: str, results: Any) -> None:
    """A run that was stopped inside an epoch ends with the bits of the run that never stopped,
    dropout included.
    """
    for rank in results[start]["resumed"]:
        assert rank["whole metrics"] == rank["parts metrics"]
        for name, value in rank["whole"].items():
            assert torch.equal(rank["parts"][name], value), name


@pytest.mark.parametrize("start", STARTS)
def test_a_run_resumes_if_most_ranks_have_no_sample(start: str, results: Any) -> None:
    """A task's own weights are known to ranks that have had no batch since the restart."""
    for rank in results[start]["resumed_without_a_sample"]:
        assert rank["samples"] == 17
        torch.testing.assert_close(rank["weights"], rank["whole"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", STARTS)
def test_one_sample_is_enough(start: str, results: Any) -> None:
    """A first step and a validation of one sample are those of that sample, on all ranks."""
    plain = Line().double()
    x_NI, y_NO = (t.double() for t in rows(20).tensors)
    (plain(x_NI[:1]) - y_NO[:1]).square().mean().backward()
    plain.configure_optimizers().step()
    val_x_NI, val_y_NO = (t.double() for t in rows(1).tensors)
    loss = (plain(val_x_NI) - val_y_NO).square().mean().item()
    for rank in results[start]["a_single_sample"]:
        torch.testing.assert_close(rank["weights"], weights(plain), rtol=0, atol=1e-12)
        assert rank["metrics"] == {"val/loss": pytest.approx(loss, rel=1e-12)}
        assert rank["samples"] == 1


@pytest.mark.parametrize("start", ["horovod", "ddp"])
def test_a_users_sampler_draws_one_order_for_all_ranks(start: str, results: Any) -> None:
    """Two ranks train on what one process would have drawn, each sample of the draw once."""
    (alone,) = results["single"]["drawn"]
    ranks = results[start]["drawn"]
    assert sorted(value for rank in ranks for value in rank["seen"]) == sorted(alone["seen"])
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", STARTS)
def test_a_full_disk_keeps_the_ranks_together(start: str, results: Any) -> None:
    """If rank 0 cannot write, training continues on all ranks, and the first checkpoint stays."""
    ranks = results[start]["full_disk"]
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    assert len(ranks[0]["written"]) >= 5
    assert ranks[0]["names"] == ["best", "epoch=0-step=1", "last"]
    assert ranks[0]["last"] == "epoch=0-step=1"


@pytest.mark.parametrize("start", STARTS)
def test_all_ranks_stop_together(start: str, results: Any) -> None:
    """EarlyStopping stops all ranks at the same step for the same reason."""
    for rank in results[start]["stopped"]:
        assert rank["steps"] == 9
        assert rank["reason"].startswith("val/loss has not improved on ")


@pytest.mark.parametrize("start", STARTS)
def test_streams_of_unequal_length_share_one_schedule(start: str, results: Any) -> None:
    """Ranks with lists of different length plan the same steps, take them together,
    and end with the same weights.
    """
    ranks = results[start]["sized_streams"]
    steps = 10 if start == "single" else 14
    assert [(rank["planned"], rank["steps"]) for rank in ranks] == [(steps, steps)] * len(ranks)
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    assert all(rank["metrics"] == ranks[0]["metrics"] != {} for rank in ranks)


@pytest.mark.parametrize("start", STARTS)
def test_an_error_of_the_first_rank_reaches_all(start: str, results: Any) -> None:
    """A checkpoint that only rank 0 looks for and does not find is an error on every rank,
    in the same words.
    """
    ranks = results[start]["refused"]
    assert all(rank == ranks[0] for rank in ranks)
    assert [message.split(":")[0] for message in ranks[0]["messages"]] == [
        "NoCheckpointError",
        "NoCheckpointError",
    ]


@pytest.mark.parametrize("start", STARTS)
def test_a_state_that_an_optimizer_lacks_ends_all_ranks(start: str, results: Any) -> None:
    """Rank 0 alone holds the optimizer's state; no rank waits for the one that has compared it."""
    for rank in results[start]["refused_state"]:
        assert "has no max_exp_avg_sq, which this run's Adam needs" in rank["message"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("horovod", "Give the optimizer that it wraps"),
        ("ddp", "Wrapped.model is a DistributedDataParallel"),
    ],
)
def test_wrappers_of_a_script_are_refused(start: str, words: str, results: Any) -> None:
    """Each gradient would be summed a second time; the error says what to give."""
    for rank in results[start]["wrapped"]:
        assert words in rank["message"]


@pytest.mark.parametrize("start", STARTS)
def test_a_sum_is_on_its_way_beside_other_collectives(start: str, results: Any) -> None:
    """A collective started before others and read after them is not mixed up with them."""
    ranks = results[start]["sum_on_its_way"]
    n = len(ranks)
    whole = n * (n + 1) // 2  # each rank adds its number, counted from 1
    for rank in ranks:
        assert rank["sums"] == [10 * i * n + whole for i in range(5)]
        assert rank["others"] == [other for i in range(5) for other in (whole, f"{i} from rank 0")]


def test_a_rank_that_waits_leaves_its_core_to_others(results: Any) -> None:
    """In half a second in a collective it sleeps many times, in place of asking without a pause:
    ranks may share cores.
    """
    assert min(results["horovod"]["waits"][0]["sleeps"]) >= 8


def test_no_thread_of_gloo_outlives_the_exit_handlers(tmp_path: Path) -> None:
    """One that did would abort a rank now and then, after its work was done."""
    done = run_command(
        f"{line_of('ddp', 2, 'leaving.py')} {tmp_path}",
        tmp_path,
        timeout_s=300,
        PYTHONPATH=str(ROOT),
    )
    assert done.code == 0, done.text
    assert done.out.count("left: []") == 2, done.text
