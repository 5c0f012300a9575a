"""Adasum, if this machine's Horovod was built with MPI."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.launching import run_command
from tests.parallel.workers import option_models as models

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
WORKER = Path(__file__).parent / "workers" / "adasum.py"
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -np 2"

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(not hvd.mpi_built(), reason="this Horovod was built without MPI"),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
]


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Maleki et al. 2020, equation 2, for one parameter."""
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """The results of each rank, of both splits."""
    folder = tmp_path_factory.mktemp("adasum")
    line = f"{MPIRUN} {sys.executable} {WORKER} {folder / 'out.pt'}"
    done = run_command(line, folder, timeout_s=90, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.code == 0, done.text
    found: list[dict[str, list[Tensor]]] = torch.load(folder / "out.pt", weights_only=False)
    return found


@pytest.mark.parametrize(("name", "split"), [("equal", 2), ("unequal", 1)])
def test_adasum_is_that_of_the_ranks_own_means(name: str, split: int, ranks: list[dict[str, list[Tensor]]]) -> None:
    """Each rank's own mean gradient, weighted by its share if shares differ, enters the paper's formula."""
    own = []
    for rows in (models.batch()[:split], models.batch()[split:4]):
        net = models.net()
        (net(rows).square().mean() * len(rows) / 4 * 2).backward()
        own.append([p.grad for p in net.parameters()])
    for rank in ranks:
        for found, a, b in zip(rank[name], *own, strict=True):
            torch.testing.assert_close(found, adasum(a, b), rtol=0, atol=1e-9)
