"""Averages of weights, optimizers of trainkit and unfreezing on two ranks:
equal on all, equal to one process, resumed bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.starts import Starts, line_of

STARTS = ["single", "horovod", "ddp"]
OTHERS = ["wrapper", "in_bytes"]
GOES_ON = ["ema", "swa", "finetuning", "muon", "adafactor", "ademamix", "soap", "averaged", *OTHERS]
STATISTICS = ("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked")

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(lambda start: line_of(start, 2, "averaging.py") + " {out}", tmp_path_factory)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", [*GOES_ON, "lars", "lamb"])
def test_all_ranks_end_alike(start: str, name: str, results: Any) -> None:
    """Weights, averages, statistics and values have the same bits on all ranks."""
    ranks = [rank["whole"] for rank in results[start][name]]
    for rank in ranks:
        assert torch.equal(rank["trained"], ranks[0]["trained"])
        assert rank["metrics"] == ranks[0]["metrics"]
        assert all(
            torch.equal(rank["state"][key], value) for key, value in ranks[0]["state"].items()
        )


@pytest.mark.parametrize("start", ["horovod", "ddp"])
@pytest.mark.parametrize("name", [*GOES_ON, "lars", "lamb"])
def test_two_ranks_are_one_process(start: str, name: str, results: Any) -> None:
    """Two ranks end with the weights of one process that accumulates;
    with SWA, with its statistics too.
    """
    (alone,) = results["single"][name]
    for rank in results[start][name]:
        torch.testing.assert_close(
            rank["whole"]["trained"], alone["whole"]["trained"], rtol=0, atol=1e-12
        )
        for key, value in alone["whole"]["state"].items():
            # In training each rank's norms follow its own batches, so that rank 0's are not those
            # of one process.
            if name == "swa" or key not in STATISTICS:
                torch.testing.assert_close(rank["whole"]["state"][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", GOES_ON)
def test_resuming_changes_no_bit_on_any_rank(start: str, name: str, results: Any) -> None:
    """A run that was stopped inside an epoch ends with the bits of the run that never stopped."""
    for rank in results[start][name]:
        whole, parts = rank["whole"], rank["parts"]
        assert torch.equal(whole["trained"], parts["trained"])
        assert whole["metrics"] == parts["metrics"]
        assert all(torch.equal(parts["state"][key], value) for key, value in whole["state"].items())


@pytest.mark.parametrize("name", ["ema", "swa", "averaged"])
def test_the_average_is_not_what_was_trained(name: str, results: Any) -> None:
    """The tests above compare averages, not the weights."""
    (alone,) = results["single"][name]
    state = alone["whole"]["state"]
    held = torch.cat([value.reshape(-1) for key, value in state.items() if key not in STATISTICS])
    assert not torch.allclose(held, alone["whole"]["trained"], rtol=0, atol=1e-6)
