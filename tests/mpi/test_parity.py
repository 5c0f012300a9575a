"""Horovod on MPI, Horovod on Gloo and one process train the same problem to the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mpi.jobs import run
from tests.parallel.starts import WORKERS

WIDTH = 2
STARTS = {"mpirun": f"mpirun -np {WIDTH} ", "gloo": f"horovodrun --gloo -np {WIDTH} ", "alone": ""}
TRAINED = ("plain", "nearly_empty", "full", "adamw", "tokens", "parts", "branches", "kept", "mixed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank found in each scenario of tests/parallel, by start."""
    found = {}
    for name, start in STARTS.items():
        folder: Path = tmp_path_factory.mktemp(name)
        done = run(f"{start}python {WORKERS / 'scenarios.py'} {folder / 'out.pt'} {WIDTH}", folder)
        assert done.code == 0, done.text
        found[name] = torch.load(folder / "out.pt", weights_only=False)
    return found


@pytest.mark.parametrize("scenario", TRAINED)
def test_ranks_of_mpirun_end_where_one_process_ends(scenario: str, results: dict[str, Any]) -> None:
    """With SGD, clipping, schedules, unequal shares and frozen layers,
    in float64 as in tests/parallel.
    """
    (alone,) = results["alone"][scenario]
    for rank in results["mpirun"][scenario]:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scenario", TRAINED)
def test_the_sums_of_two_ranks_are_those_of_gloo(scenario: str, results: dict[str, Any]) -> None:
    """Bit for bit: the sum of two numbers has one order."""
    for rank, other in zip(results["mpirun"][scenario], results["gloo"][scenario], strict=True):
        assert torch.equal(rank["weights"], other["weights"])


def test_all_ranks_end_with_the_same_bits(results: dict[str, Any]) -> None:
    """Whatever is trained."""
    held = {name: ranks for name, ranks in results["mpirun"].items() if "weights" in ranks[0]}
    assert len(held) >= 11
    for name, ranks in held.items():
        assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks), name


def test_an_evaluation_is_exact_and_no_stream_loses_a_sample(results: dict[str, Any]) -> None:
    """Values are those of each sample once;
    ranks with streams of different lengths end together.
    """
    for rank in results["mpirun"]["evaluation"]:
        assert rank["value"] == pytest.approx(rank["expected"], rel=1e-15) and rank["same"]
    seen, others = (
        sorted(v for rank in results[name]["streams"] for v in rank["seen"])
        for name in ("mpirun", "gloo")
    )
    assert seen == others and len(seen) > 0
