"""The order of ddp's collectives at eight ranks, by torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.engine.ddp.reduce import BucketReducer
from trainkit.engine.reduce.buckets import split_frozen
from trainkit.engine.reduce.wire import Wire


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rank 3 of 8, alone; the sizes of its sums as they start."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    sizes: list[int] = []
    real = dist.all_reduce

    def noted(tensor: torch.Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", noted)
    yield sizes
    dist.destroy_process_group()


def reducer_of(net: nn.Module) -> BucketReducer:
    """A bucket for each parameter."""
    trained, frozen = split_frozen(net.named_parameters())
    return BucketReducer([[named] for named in reversed(trained)], frozen, Wire(), set(), None)


@pytest.mark.parametrize("has_samples", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_a_rank_without_room_starts_the_sums_of_all_others(
    sent: list[int], monkeypatch: pytest.MonkeyPatch, fails_at: int, has_samples: bool
) -> None:
    """Wherever it runs out of memory, in backward or in the end of the step, with samples or
    without, it has started as many sums of the same sizes in the same order once it has given up;
    and the next step is one as any other.
    """
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reducer = reducer_of(net)
    net(torch.ones(2, 3)).sum().backward()
    reducer.finish()
    whole, calls = list(sent), 0
    sent.clear()
    real = torch.cat

    def cat(pieces: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(pieces)

    monkeypatch.setattr(torch, "cat", cat)
    net.zero_grad()
    failed = 0
    try:
        if has_samples:
            net(torch.ones(2, 3)).sum().backward()
    except torch.OutOfMemoryError:
        failed += 1
    try:
        reducer.finish()
    except torch.OutOfMemoryError:
        failed += 1
        reducer.give_up()
        assert all(parameter.grad is None for parameter in net.parameters())
    assert (failed, sent) == (1, whole)
    monkeypatch.setattr(torch, "cat", real)
    sent.clear()
    net.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    reducer.finish()
    assert sent == whole


def storages(tensors: Any) -> set[int]:
    """Return where the memory of these tensors begins."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_gradients_are_held_once_while_they_are_summed(
    sent: list[int], narrow: torch.dtype | None
) -> None:
    """From the moment on that a bucket's sum starts, `.grad` is in the memory that is summed; only
    what is narrowed on the way is held beside it. After the step it is there in both cases.
    """
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    trained, frozen = split_frozen(net.named_parameters())
    buckets = [trained[3:1:-1], trained[1::-1]]
    reducer = BucketReducer(buckets, frozen, Wire(narrow), set(), None)
    with reducer.no_sync():
        net(torch.ones(2, 3)).sum().backward()
    own = [parameter.grad.clone() for _, parameter in trained]
    net(torch.ones(2, 3)).sum().backward()
    last = [parameter for _, parameter in buckets[0]]
    summed = storages([reducer._buckets[0].handle[1]])
    assert (storages(p.grad for p in last) == summed) == (narrow is None)
    reducer.finish()
    assert len(storages(p.grad for _, p in trained)) == 2
    for (_, parameter), before in zip(trained, own, strict=True):
        twice = (2 * before).to(narrow or before.dtype).float()
        assert torch.equal(parameter.grad, twice)
        assert parameter.grad.stride() == parameter.stride()


def test_a_gradient_that_was_put_in_place_of_a_sum_is_not_taken(sent: list[int]) -> None:
    """After `finish` each `.grad` is the sum of what backward left, whatever a hook put there."""
    net = nn.Linear(3, 5)
    reducer = reducer_of(net)
    net(torch.ones(2, 3)).sum().backward()
    net.bias.grad = torch.zeros(5)
    reducer.finish()
    assert net.bias.grad.tolist() == [2.0] * 5


def test_elements_of_a_weight_with_gaps_in_memory_keep_their_places(sent: list[int]) -> None:
    """Three rows of a matrix that is in memory column by column: the gradient after the sum is that
    of backward, whose strides cannot be the weight's.
    """
    net = nn.Module()
    net.rows = nn.Parameter(torch.zeros(8, 6).t()[:3])
    net.line = nn.Parameter(torch.zeros(2))
    factors = torch.arange(24.0).reshape(3, 8)
    reducer = reducer_of(net)
    ((net.rows * factors).sum() + net.line.sum()).backward()
    reducer.finish()
    assert torch.equal(net.rows.grad, factors)
