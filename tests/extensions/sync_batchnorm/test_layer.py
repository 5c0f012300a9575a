"""BatchNorm over ranks in one process: the arithmetic, conversions, and refusals."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Net, loader, quiet
from trainkit.data.plan import StepPlan
from trainkit.engine.single import SingleEngine
from trainkit.errors import ConfigError
from trainkit.extensions.sync_batchnorm import layer as sync_batchnorm
from trainkit.extensions.sync_batchnorm.layer import (
    SyncBatchNorm,
    check_even,
    convert,
    synchronise,
)


def alone(tensor: Tensor) -> Tensor:
    """The sum over one rank."""
    return tensor.clone()


def along(vector: Tensor | None, like: Tensor) -> Any:
    """A vector over channels, to broadcast; 1 for none."""
    return 1 if vector is None else vector.reshape(1, -1, *[1] * (like.dim() - 2))


class Kernels:
    """What torch's kernels for CUDA compute, by their formulas (ATen/native/cuda/Normalization.cuh):
    they exist for no other device.
    """

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The mean, and 1 / sqrt(biased variance + eps)."""
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(
        x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        """The output."""
        scaled = (x - along(mean, x)) * along(invstd, x) * along(weight, x)
        return scaled if bias is None else scaled + along(bias, x)

    @staticmethod
    def batch_norm_backward_reduce(
        dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *needed: bool
    ) -> tuple[Tensor, ...]:
        """The sums of dy and of dy (x - mean), and the gradients of weight and bias."""
        dims = [0, *range(2, x.dim())]
        sum_dy, sum_dy_xmu = dy.sum(dims), (dy * (x - along(mean, x))).sum(dims)
        none = torch.empty(0)
        assert needed[0]
        return (
            sum_dy,
            sum_dy_xmu,
            sum_dy_xmu * invstd if needed[1] else none,
            sum_dy if needed[2] else none,
        )

    @staticmethod
    def batch_norm_backward_elemt(
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Any,
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
        count: Tensor,
    ) -> Tensor:
        """The gradient of the input."""
        assert count.dtype == torch.int32
        number = count.sum()
        centred = (x - along(mean, x)) * along(invstd.square() * sum_dy_xmu / number, x)
        return (dy - along(sum_dy / number, x) - centred) * along(invstd, x) * along(weight, x)


@pytest.fixture(params=["written out", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the passes over a batch are computed."""
    if request.param == "kernels":
        monkeypatch.setattr(sync_batchnorm, "_way_of", lambda tensor: sync_batchnorm._ByKernels)
        for name in [name for name in vars(Kernels) if name.startswith("batch_norm")]:
            monkeypatch.setattr(torch, name, getattr(Kernels, name))
    return str(request.param)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_ranks_with_parts_of_a_batch_have_its_statistics(
    way: str, memory_format: torch.memory_format
) -> None:
    """Two ranks with 3 and 5 images: outputs, gradients and statistics of one BatchNorm over all,
    in float64.
    """
    whole = torch.randn(8, 4, 3, 3, dtype=torch.float64).to(memory_format=memory_format)
    plain, inputs = nn.BatchNorm2d(4).double(), whole.clone().requires_grad_()
    expected = plain(inputs)
    expected.sin().sum().backward()

    def work(engine: ThreadEngine) -> tuple[Tensor, ...]:
        own = whole[:3] if engine.place == 0 else whole[3:]
        part, layer = own.clone().requires_grad_(), nn.BatchNorm2d(4).double()
        with engine:
            synchronise(layer, engine.comm)
            output = layer(part)
            output.sin().sum().backward()
        return output, part.grad, layer.running_var, layer.weight.grad, layer.bias.grad  # type: ignore[return-value]

    (a, da, var, dwa, dba), (b, db, _, dwb, dbb) = World(2).run(work)
    assert plain.weight.grad is not None and plain.bias.grad is not None
    for found, right in (
        (torch.cat([a, b]), expected),
        (torch.cat([da, db]), inputs.grad),
        (var, plain.running_var),
        (dwa + dwb, plain.weight.grad),
        (dba + dbb, plain.bias.grad),
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("images", [0, 3])
def test_a_rank_may_have_nothing(images: int) -> None:
    """Two ranks with 0 images and with some (heads without regions): outputs, gradients and
    statistics of one BatchNorm over all; with none on both, which leave the statistics as they are.
    """
    whole = torch.randn(images, 4, 3, 3, dtype=torch.float64)
    plain, inputs = nn.BatchNorm2d(4).double(), whole.clone().requires_grad_()
    expected = plain(inputs)
    expected.sin().sum().backward()

    def work(engine: ThreadEngine) -> tuple[Any, ...]:
        own = whole[:0] if engine.place == 0 else whole
        part, layer = own.clone().requires_grad_(), nn.BatchNorm2d(4).double()
        with engine:
            synchronise(layer, engine.comm)
            output = layer(part)
            output.sin().sum().backward()
        return output, part.grad, layer.state_dict(), layer.weight.grad, layer.bias.grad

    (a, da, state, dwa, dba), (b, db, same, dwb, dbb) = World(2).run(work)
    assert plain.weight.grad is not None and plain.bias.grad is not None
    assert a.shape == da.shape == (0, 4, 3, 3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
        torch.testing.assert_close(same[name], value)
    for found, right in (
        (b, expected),
        (db, inputs.grad),
        (dwa + dwb, plain.weight.grad),
        (dba + dbb, plain.bias.grad),
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_kernels_take_no_empty_batch() -> None:
    """A batch of nothing has no grid of threads; it is computed without them, on any device."""
    batch = Mock(is_cuda=True, numel=lambda: 0)
    assert sync_batchnorm._way_of(batch) is sync_batchnorm._Normalise
    batch.numel = lambda: 1
    assert sync_batchnorm._way_of(batch) is sync_batchnorm._ByKernels


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(4), (5, 4)),
        (lambda: nn.BatchNorm1d(4, momentum=None), (5, 4, 3)),
        (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
        (lambda: nn.BatchNorm3d(4, eps=0.1, track_running_stats=False), (2, 4, 2, 2, 2)),
    ],
)
def test_at_one_rank_it_is_batchnorm(
    way: str, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Outputs, gradients and statistics of two batches, of every form of the layer, in float64."""
    plain, layer = make().double(), make().double()
    convert(layer, alone)
    for seed in range(2):
        drawn = torch.randn(
            shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        ours, theirs = (drawn.clone().requires_grad_() for _ in range(2))
        for module, inputs in ((layer, ours), (plain, theirs)):
            module(inputs).sin().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    for own, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=1e-12)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value, rtol=0, atol=1e-12)


def test_nothing_cancels_where_the_mean_is_large(way: str) -> None:
    """float32 around 10,000 with a spread of 1:
    the variance has all the digits that the input has.
    """
    drawn = 10_000 + torch.randn(4096, 1, generator=torch.Generator().manual_seed(1))
    layer = nn.BatchNorm1d(1, momentum=1.0)
    convert(layer, alone)
    layer(drawn)
    assert float(layer.running_var) == pytest.approx(float(drawn.double().var()), rel=1e-4)  # type: ignore[arg-type]


def test_layers_change_in_place_and_know_each_other_no_more() -> None:
    """A reference to a layer is one to the changed layer;
    a copy stays connected to the ranks, a pickled one does not.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kept, weight = model[1], model[1].weight
    convert(model, alone)
    assert model[1] is kept
    assert isinstance(kept, SyncBatchNorm)
    assert kept.weight is weight
    assert copy.deepcopy(kept).link.all_reduce is alone
    stream = io.BytesIO()
    torch.save(kept, stream)
    stream.seek(0)
    read = torch.load(stream, weights_only=False)
    assert read.link.all_reduce is None
    assert read(torch.randn(3, 2)).shape == (3, 2)
    convert(model, other := lambda tensor: tensor)
    assert kept.link.all_reduce is other


def test_a_layer_with_ways_of_its_own_is_refused() -> None:
    """A subclass of BatchNorm is not converted: its additions would be lost."""

    class Activated(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(2), Activated(2))
    with pytest.raises(
        ConfigError,
        match=r"sync_batchnorm is true, but '1' is a Activated.*trainer\.sync_batchnorm=false",
    ):
        convert(model, alone)
    assert type(model[0]) is nn.BatchNorm2d


def test_statistics_over_a_group_of_ranks_are_refused() -> None:
    """A process group of torch's layer is not taken for all ranks; nothing is converted."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.SyncBatchNorm(2))
    model[2].process_group = object()
    with pytest.raises(
        ConfigError,
        match=r"sync_batchnorm is true, .* and '2' is an nn.SyncBatchNorm with a process_group of"
        r" its own. Leave it out .* or set trainer\.sync_batchnorm=false",
    ):
        convert(model, alone)
    assert type(model[0]) is nn.BatchNorm2d
    model[2].process_group = None
    convert(model, alone)
    assert {type(layer) for layer in model} == {SyncBatchNorm}


def test_one_process_keeps_its_batchnorm() -> None:
    """There is no other rank to share statistics with."""
    with SingleEngine("cpu") as engine:
        model = nn.Sequential(nn.BatchNorm1d(2))
        assert synchronise(model, engine.comm) is model
        assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize(("samples", "batch_size"), [(16, 4), (16 + 2, 4), (16 + 9, 4), (7, 1)])
def test_short_steps_are_fine_where_each_rank_has_a_part(samples: int, batch_size: int) -> None:
    """Parts of different sizes are exact:
    only a rank without a microbatch that others have is refused.
    """
    plan = StepPlan(samples, batch_size, world_size=2, accumulate=2)
    if samples == 7:
        with pytest.raises(
            ConfigError, match=r"the last step of an epoch has 3 samples for 2 ranks"
        ):
            check_even(plan)
    else:
        check_even(plan)


def test_data_that_leaves_a_rank_without_a_part_is_refused() -> None:
    """The others would wait for it in their BatchNorm; a stream cannot be known."""
    plan = StepPlan(17, 4, world_size=2, accumulate=2)
    with pytest.raises(
        ConfigError, match=r"last step of an epoch has 1 samples for 2 ranks.*drop_last=True"
    ):
        check_even(plan)
    check_even(StepPlan(17, 4, world_size=2, accumulate=2, drop_last=True))
    with pytest.raises(
        ConfigError, match=r"the training data is a stream.*trainer\.sync_batchnorm=false"
    ):
        check_even(None)


def test_batch_norm_is_plain_again_after_a_run(tmp_path: Path) -> None:
    """After a run with sync_batchnorm a forward on one rank alone ends, in training mode too."""

    def work(engine: ThreadEngine) -> list[bool]:
        task = Net()
        quiet(tmp_path, engine=engine, sync_batchnorm=True).fit(task, loader(24))
        task.train()
        if engine.place == 0:
            task(torch.randn(4, 3))  # no rank answers any more
        return [
            isinstance(m, SyncBatchNorm) and m.link.all_reduce is not None for m in task.modules()
        ]

    assert not any(sum(World(2).run(work), []))
