"""The arithmetic of PowerSGD, on two ranks in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainkit.extensions.communication.low_rank import PowerSGDSums
from trainkit.extensions.communication.settings import PowerSGD

SHAPES = {"wide": (4, 9), "tall": (11, 3), "picture": (6, 2, 3, 3), "bias": (5,)}


def ranks(
    settings: PowerSGD, count: int = 2
) -> list[tuple[PowerSGDSums, list[tuple[str, nn.Parameter]]]]:
    """Return the factors and the parameters of each rank, started."""
    made = []
    for _ in range(count):
        entries = [
            (name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
            for name, shape in SHAPES.items()
        ]
        low = PowerSGDSums(settings)
        low.start(entries, frozenset())
        made.append((low, entries))
    return made


def step(
    made: list[tuple[PowerSGDSums, list[tuple[str, nn.Parameter]]]], seed: int, zero: bool = False
) -> dict[str, Tensor]:
    """Sum random gradients by factors; return what exact sums would be."""
    generator = torch.Generator().manual_seed(seed)
    exact: dict[str, Tensor] = {}
    for _, entries in made:
        for name, p in entries:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * (not zero)
            exact[name] = exact.get(name, 0) + p.grad.clone()
    factors = [low.begin(entries, torch.ones(2)) for low, entries in made]
    first = sum(f.message for f in factors)
    second = [low.project(f, first.clone()) for (low, _), f in zip(made, factors, strict=True)]
    flags = [low.finish(f, sum(second).clone()) for (low, _), f in zip(made, factors, strict=True)]
    for low, _ in made:
        low.end_step([])
    assert all(
        torch.equal(own, torch.full((2,), float(len(made)), dtype=torch.float64)) for own in flags
    )
    return exact


def wide(tensor: Tensor) -> Tensor:
    """The matrix whose error is held."""
    flat = tensor.reshape(len(tensor), -1)
    return flat if flat.shape[0] <= flat.shape[1] else flat.T


@pytest.mark.parametrize("rank", [1, 2])
def test_nothing_is_lost(rank: int) -> None:
    """Over all steps, the results and what the ranks hold back add up to the exact sums;
    the ranks' results are equal.
    """
    made = ranks(PowerSGD(rank=rank, start_after_steps=0, min_compression=0.0))
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    summed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for seed in range(6):
        for name, exact in step(made, seed).items():
            total[name] += exact
        for (name, p), (_, other) in zip(made[0][1], made[1][1], strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, other.grad)
            summed[name] += p.grad
    torch.testing.assert_close(summed["bias"], total["bias"])
    for name in ("wide", "tall", "picture"):
        held = sum(low.own_state()["error"][name] for low, _ in made)
        assert float(held.norm()) > 0.1
        torch.testing.assert_close(wide(summed[name]) + held, wide(total[name]))


def test_full_rank_is_exact_after_steps_without_gradients() -> None:
    """Zero gradients leave factors of zero, and no direction is lost by them."""
    made = ranks(PowerSGD(rank=99, start_after_steps=0, min_compression=0.0))
    for seed, zero in ((0, False), (1, True), (2, True), (3, False)):
        exact = step(made, seed, zero)
        for name, p in made[0][1]:
            torch.testing.assert_close(p.grad, exact[name], rtol=1e-12, atol=1e-12)


def test_low_rank_recovers_after_steps_without_gradients() -> None:
    """After two steps of zeros a matrix of rank 1 is found within two steps."""
    made = ranks(PowerSGD(rank=1, start_after_steps=0, min_compression=0.0), count=1)
    ((low, entries),) = made
    for seed in range(2):
        step(made, seed, zero=True)
    column, row = torch.randn(4, 1, dtype=torch.float64), torch.randn(1, 9, dtype=torch.float64)
    for _ in range(2):
        entries[0][1].grad = column @ row
        factors = low.begin(entries[:1], None)
        low.finish(factors, low.project(factors, factors.message))
    # The second step returns the gradient and what the first one held back.
    error = low.own_state()["error"]["wide"]
    assert float(error.norm()) < 1e-9


def test_fewer_numbers_travel() -> None:
    """Two messages of rank x (rows + columns) numbers, beside the vectors and flags."""
    ((low, entries),) = ranks(PowerSGD(rank=1, start_after_steps=0, min_compression=0.0), count=1)
    for _, p in entries:
        p.grad = torch.ones_like(p)
    factors = low.begin(entries, torch.ones(2))
    low.project(factors, factors.message)
    assert factors.num_bytes == 8 * ((4 + 9) + (11 + 3) + (6 + 18) + 5 + 2)
