"""One process, Horovod and torch.distributed solve the same problem,
and it is the one that a few plain lines solve.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.parallel.starts import Starts, line_of
from trainkit.data.order import shuffled

STARTS = {  # name: (launcher, ranks, or what one process accumulates)
    "single, width 2": ("single", 2),
    "horovod, 2 ranks": ("horovod", 2),
    "ddp, 2 ranks": ("ddp", 2),
    "single, width 3": ("single", 3),
    "horovod, 3 ranks": ("horovod", 3),
    "ddp, 3 ranks": ("ddp", 3),
}
SEVERAL = [name for name in STARTS if "ranks" in name]
BATCH = 4

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(
        lambda start: line_of(*STARTS[start], "scenarios.py") + f" {{out}} {STARTS[start][1]}",
        tmp_path_factory,
    )


def problem(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The regression problem of the worker."""
    inputs = torch.randn(
        samples, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    return inputs, (inputs.sum(1, keepdim=True) * 0.5).tanh()


def by_hand(samples: int, width: int, full: bool, tokens: bool = False) -> torch.Tensor:
    """Train the worker's problem with a plain loop over whole global batches,
    and return the weights.
    """
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ).double()
    inputs, targets = problem(samples)
    steps, batch = math.ceil(samples / (width * BATCH)), width * BATCH
    base = 0.05 * batch / 2 if full else 0.3
    momentum = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2} if full else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=base, **momentum)
    for step in range(2 * steps):
        places = shuffled(samples, 0, step // steps)[step % steps * batch :][:batch]
        losses = (net(inputs[places]) - targets[places]).pow(2)
        weight = (
            1 + (inputs[places][:, :1].abs() * 3).floor() if tokens else torch.ones_like(losses)
        )
        optimizer.zero_grad()
        ((losses * weight).sum() / weight.sum()).backward()
        if full:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            warm = min(1.0, 2 / batch + (1 - 2 / batch) * (step + 1) / 5)
            optimizer.param_groups[0]["lr"] = (
                base * warm * 0.5 * (1 + math.cos(math.pi * step / (2 * steps)))
            )
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("scenario", "extra", "options"),
    [
        ("plain", lambda width: width * BATCH * 3 + 5, {"full": False}),
        ("nearly_empty", lambda width: width * BATCH * 2 + 1, {"full": False}),
        ("full", lambda width: width * BATCH * 3 + 5, {"full": True}),
        ("tokens", lambda width: width * BATCH * 2 + 1, {"full": False, "tokens": True}),
    ],
)
def test_training_equals_a_plain_loop(
    start: str, scenario: str, extra: Any, options: Any, results: Any
) -> None:
    """The weights are those of a hand-written loop over the same global batches,
    on every engine and every rank.
    """
    width = STARTS[start][1]
    expected = by_hand(extra(width), width, **options)
    for rank in results[start][scenario]:
        torch.testing.assert_close(rank["weights"], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", SEVERAL)
@pytest.mark.parametrize(
    "scenario",
    ["plain", "nearly_empty", "full", "adamw", "tokens", "parts", "branches", "kept", "mixed"],
)
def test_ranks_end_where_one_process_ends(start: str, scenario: str, results: Any) -> None:
    """Several ranks and one process that accumulates end with the same weights."""
    (alone,) = results[f"single, width {STARTS[start][1]}"][scenario]
    for rank in results[start][scenario]:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", SEVERAL)
def test_experts_are_balanced_over_all_ranks(start: str, results: Any) -> None:
    """Weights and biases are those of one process to 1e-12, with experts that a rank has no token
    for, and so no gradient, in a microbatch, and even in a whole step.
    """
    (alone,) = results[f"single, width {STARTS[start][1]}"]["experts"]
    ranks = results[start]["experts"]
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-12)
        unused = [sum(step).eq(0) for step in torch.tensor(rank["counts"]).split(3)]
        assert sum(int(step.sum()) for step in unused) > 0
    assert alone["weights"][-15:].abs().max() > 0.1
    loads = [torch.tensor(rank["counts"])[:3].sum(0) for rank in ranks]
    assert any((load == 0).any() for load in loads) and not torch.equal(loads[0], loads[1])


@pytest.mark.parametrize("start", SEVERAL)
def test_all_ranks_end_with_the_same_bits(start: str, results: Any) -> None:
    """Whatever is trained, all ranks end with bit-for-bit the same weights."""
    held = {name: ranks for name, ranks in results[start].items() if "weights" in ranks[0]}
    assert len(held) >= 11
    for name, ranks in held.items():
        assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks), name


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("scenario", "rest"), [("plain", (3, 5)), ("nearly_empty", (2, 1))])
def test_each_sample_is_trained_on_once_an_epoch(
    start: str, scenario: str, rest: tuple[int, int], results: Any
) -> None:
    """Over all ranks, each sample of the data is seen exactly twice in two epochs."""
    samples = STARTS[start][1] * BATCH * rest[0] + rest[1]
    seen = sorted(value for rank in results[start][scenario] for value in rank["seen"])
    assert seen == sorted(problem(samples)[0][:, 0].tolist() * 2)


@pytest.mark.parametrize("start", STARTS)
def test_an_idle_layer_is_left_alone_and_a_thawed_one_trained(start: str, results: Any) -> None:
    """Weight decay does not touch an unused layer;
    a layer that was frozen first is trained later.
    """
    assert all(rank["idle_kept"] and rank["thawed_moved"] for rank in results[start]["parts"])


@pytest.mark.parametrize("start", STARTS)
def test_an_overflow_on_one_rank_holds_back_all(start: str, results: Any) -> None:
    """fp16: one rank's overflow skips the update on all, once."""
    assert all((rank["skipped"], rank["steps"]) == (1, 6) for rank in results[start]["scaled_half"])


@pytest.mark.parametrize(
    ("start", "tolerance"), [("horovod, 2 ranks", 0.0), ("horovod, 3 ranks", 1e-6)]
)
def test_our_sums_are_those_of_the_stock_optimizer(
    start: str, tolerance: float, results: Any
) -> None:
    """As hvd.DistributedOptimizer, in float32 with accumulation, momentum and channels_last;
    bit for bit at 2 ranks.
    """
    # Of three numbers the order of summing matters, and Horovod's depends on what it happened to
    # fuse.
    ours, stock = (
        results[start][name][0]["weights"] for name in ("channels_last", "stock_wrapper")
    )
    torch.testing.assert_close(ours, stock, rtol=0, atol=tolerance)


@pytest.mark.parametrize("start", STARTS)
def test_evaluation_is_exact(start: str, results: Any) -> None:
    """The value is the mean over each sample once, on all ranks;
    predictions are complete and in order, bit for bit.
    """
    for rank in results[start]["evaluation"]:
        assert rank["value"] == pytest.approx(rank["expected"], rel=1e-15)
        assert rank["same"]


@pytest.mark.parametrize("start", SEVERAL)
def test_streams_of_unequal_length_lose_nothing(start: str, results: Any) -> None:
    """Ranks with streams of different lengths train on all samples of all, and end together."""
    samples = STARTS[start][1] * BATCH * 2 + 3
    ranks = results[start]["streams"]
    assert sorted(value for rank in ranks for value in rank["seen"]) == sorted(
        problem(samples)[0][:, 0].tolist() * 2
    )
    assert all(rank["samples"] == 2 * samples for rank in ranks)
