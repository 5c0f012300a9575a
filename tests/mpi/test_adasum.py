"""Adasum, which Horovod computes by MPI only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.mpi.jobs import run
from tests.parallel.workers import option_models as models

WORKER = Path(__file__).parent / "workers" / "adasum.py"


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Maleki et al. 2020, equation 2, for one parameter."""
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """The results of each rank, of both splits."""
    folder = tmp_path_factory.mktemp("adasum")
    done = run(f"mpirun -np 2 python {WORKER} {folder / 'out.pt'}", folder)
    assert done.code == 0, done.text
    found: list[dict[str, list[Tensor]]] = torch.load(folder / "out.pt", weights_only=False)
    return found


@pytest.mark.parametrize(("name", "split"), [("equal", 2), ("unequal", 1)])
def test_adasum_is_that_of_the_ranks_own_means(
    name: str, split: int, ranks: list[dict[str, list[Tensor]]]
) -> None:
    """Each rank's own mean gradient, weighted by its share if shares differ,
    enters the paper's formula.
    """
    own = []
    for rows in (models.batch()[:split], models.batch()[split:4]):
        net = models.net()
        (net(rows).square().mean() * len(rows) / 4 * 2).backward()
        own.append([p.grad for p in net.parameters()])
    for rank in ranks:
        for found, a, b in zip(rank[name], *own, strict=True):
            torch.testing.assert_close(found, adasum(a, b), rtol=0, atol=1e-9)
