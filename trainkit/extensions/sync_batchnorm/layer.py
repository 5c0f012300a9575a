"""BatchNorm over the batch of all ranks (Ioffe & Szegedy 2015, with the ranks' microbatches as
one), on any device.

    forward    each rank: count, mean and variance of its part   -> one sum over ranks -> mean and variance of the whole
    backward   each rank: sums of dy and of dy x_hat of its part -> one sum over ranks -> dx

Both are exact for parts of different sizes, also of none. Each rank's variance is taken about its
own mean, and only the combination (Chan et al. 1979) is of sums of squares, in float64: nothing
cancels if the mean is large. Weight and bias get this rank's part of their gradient; the engine
sums it like every other.

On CUDA the passes over the batch are torch's own kernels, those of nn.SyncBatchNorm; elsewhere they
are written out below, which is what the kernels are compared with.

A layer becomes synchronised in place, by its class: parameters, buffers (hence the keys of a
state_dict), hooks, and whatever else refers to the layer stay as they are. In eval mode, or without
ranks, it is the BatchNorm that it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.data.plan import StepPlan
from trainkit.engine.collectives import Collectives
from trainkit.errors import ConfigError

AllReduce = Callable[[Tensor], Tensor]


class RankLink:
    """The connection of a layer to the other ranks.
    A copy of a model shares it; a pickled model has lost it.
    """

    def __init__(self, all_reduce: AllReduce | None = None) -> None:
        """Hold the sum over ranks."""
        self.all_reduce = all_reduce

    def __deepcopy__(self, memo: dict[int, Any]) -> RankLink:
        return self

    def __reduce__(self) -> tuple[type[RankLink], tuple[()]]:
        return RankLink, ()


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer that `convert` changed; it is never constructed.

    Attributes:
        shares_statistics: all ranks have the same buffers (asked by DivergenceGuard).
    """

    shares_statistics = True
    link: RankLink

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(
                f"BatchNorm takes [N, C, ...], and got a tensor of shape {list(input.shape)}."
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise `input` [N, C, ...]; in training, by the statistics of all ranks."""
        if not self.training or self.link.all_reduce is None:
            return super().forward(input)
        self._check_input_dim(input)
        output, count, mean, var = _way_of(input).apply(
            input, self.weight, self.bias, self.eps, self.link.all_reduce
        )
        if self.track_running_stats:
            self._update(count, mean, var)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        assert (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        )
        self.num_batches_tracked.add_(1)
        unbiased = var * (count / (count - 1).clamp(min=1))
        # without a momentum: the mean over all batches so far
        share = 1 / self.num_batches_tracked.double()
        if self.momentum is not None:
            share = torch.full_like(share, self.momentum)
        share = share * count.clamp(max=1)  # 0 if no rank has an element
        for held, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            held.lerp_(new.to(held.dtype), share.to(held.dtype))


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all ranks;
    returns also the count, the mean and the biased variance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        eps: float,
        all_reduce: AllReduce,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x_NC.dim())]
        var_C = mean_C = x_NC.new_zeros(x_NC.shape[1])  # of nothing, whose own would be NaN
        if x_NC.numel():
            var_C, mean_C = torch.var_mean(_at_least_float32(x_NC), dims, correction=0)
        count, mean_C, var_C = _of_all(x_NC, mean_C.double(), var_C.double(), all_reduce)
        invstd_C = (var_C + eps).rsqrt()
        wide = _at_least_float32(x_NC).dtype
        scale_C = invstd_C if weight_C is None else invstd_C * weight_C
        ctx.save_for_backward(x_NC, weight_C, mean_C, invstd_C, count)
        ctx.all_reduce = all_reduce
        ctx.has_bias = bias_C is not None
        ctx.mark_non_differentiable(count, mean_C, var_C)
        centred = _at_least_float32(x_NC) - _along(mean_C.to(wide), x_NC)
        output = centred * _along(scale_C.to(wide), x_NC)
        if bias_C is not None:
            output += _along(bias_C.to(wide), x_NC)
        return output.to(x_NC.dtype), count, mean_C, var_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x_NC, weight_C, mean_C, invstd_C, count = ctx.saved_tensors
        wide = _at_least_float32(x_NC).dtype
        dims = [0, *range(2, x_NC.dim())]
        dy = dy_NC.to(wide)
        x_hat = (x_NC.to(wide) - _along(mean_C.to(wide), x_NC)) * _along(invstd_C.to(wide), x_NC)
        own_dy_C, own_dot_C = dy.sum(dims), (dy * x_hat).sum(dims)
        total = ctx.all_reduce(torch.cat([own_dy_C, own_dot_C]).double()) / count
        mean_dy_C, mean_dot_C = total.chunk(2)
        dx = dy - _along(mean_dy_C.to(wide), x_NC) - x_hat * _along(mean_dot_C.to(wide), x_NC)
        scale_C = invstd_C if weight_C is None else invstd_C * weight_C
        dx = (dx * _along(scale_C.to(wide), x_NC)).to(x_NC.dtype)
        dweight_C = None if weight_C is None else own_dot_C.to(weight_C.dtype)
        dbias_C = (
            own_dy_C.to(weight_C.dtype if weight_C is not None else wide) if ctx.has_bias else None
        )
        return dx, dweight_C, dbias_C, None, None


class _ByKernels(torch.autograd.Function):
    """The same by torch's kernels for CUDA: each reads the batch once, in its own dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        eps: float,
        all_reduce: AllReduce,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_NC = _laid_out(x_NC)
        mean_C, invstd_C = torch.batch_norm_stats(x_NC, eps)
        var_C = (invstd_C.double().pow(-2) - eps).clamp(min=0)
        count, all_mean_C, all_var_C = _of_all(x_NC, mean_C.double(), var_C, all_reduce)
        wide = mean_C.dtype
        mean_C = all_mean_C.to(wide)
        invstd_C = (all_var_C + eps).rsqrt().to(wide)
        ctx.save_for_backward(x_NC, weight_C, mean_C, invstd_C, count)
        ctx.all_reduce = all_reduce
        ctx.has_bias = bias_C is not None
        ctx.mark_non_differentiable(count, all_mean_C, all_var_C)
        output = torch.batch_norm_elemt(x_NC, weight_C, bias_C, mean_C, invstd_C, eps)
        return output, count, all_mean_C, all_var_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x_NC, weight_C, mean_C, invstd_C, count = ctx.saved_tensors
        dy_NC = _laid_out(dy_NC)
        has_weight = weight_C is not None
        dy_C, dot_C, *of_own = torch.batch_norm_backward_reduce(
            dy_NC, x_NC, mean_C, invstd_C, weight_C, True, has_weight, ctx.has_bias
        )
        total = ctx.all_reduce(torch.cat([dy_C, dot_C]).double()).to(mean_C.dtype)
        wide_C = weight_C.to(mean_C.dtype) if has_weight else None
        dy_C, dot_C = total.chunk(2)
        dx_NC = torch.batch_norm_backward_elemt(
            dy_NC, x_NC, mean_C, invstd_C, wide_C, dy_C, dot_C, count.to(torch.int32)
        )
        dweight_C = of_own[0] if has_weight else None
        dbias_C = of_own[1] if ctx.has_bias else None
        return dx_NC, dweight_C, dbias_C, None, None


def _way_of(tensor: Tensor) -> Any:
    return _ByKernels if tensor.is_cuda and tensor.numel() else _Normalise


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in a layout that the kernels read: channel by channel, or channels last."""
    last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    is_last = tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=last)
    return tensor if is_last else tensor.contiguous()


def _of_all(
    x_NC: Tensor, mean_C: Tensor, var_C: Tensor, all_reduce: AllReduce
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of elements a channel on all ranks [1], their mean and their biased
    variance [C], given those of this rank, in float64.
    """
    own = x_NC.numel() // x_NC.shape[1]
    count = torch.full((1,), own, dtype=torch.float64, device=x_NC.device)
    total = all_reduce(torch.cat([count, count * mean_C, count * (var_C + mean_C.square())]))
    count, sums_C, squares_C = total[:1].clone(), *total[1:].chunk(2)
    number = count.clamp(min=1)
    mean_C = sums_C / number
    return count, mean_C, (squares_C / number - mean_C.square()).clamp(min=0)


def synchronise(model: nn.Module, comm: Collectives) -> nn.Module:
    """Let the BatchNorm layers of `model` take their statistics over all ranks; at one rank nothing
    changes.

    Each layer changes in place, so that parameters, buffers and references stay. Call it on all
    ranks, at any time before the first forward, and only if all ranks take part in each microbatch
    of each step (`check_even`).

    Returns:
        The same model.

    Raises:
        ConfigError: a layer is a BatchNorm with a forward, or a process group, of its own.
    """
    if comm.ranks.world_size > 1:
        convert(model, comm.statistics_all_reduce())
    return model


def convert(model: nn.Module, all_reduce: AllReduce) -> None:
    """Make all BatchNorm layers of `model`, itself included, take their statistics over the ranks,
    in place.

    Args:
        model: the model; layers that were converted before get the new `all_reduce`.
        all_reduce: returns the sum over ranks of a tensor.

    Raises:
        ConfigError: a layer is of a class derived from BatchNorm, with a forward of its own, which
            would be lost; or it has a process group of its own.
    """
    known = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm)
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    for name, layer in layers:
        if type(layer) not in known:
            raise ConfigError(
                f"trainer.sync_batchnorm is true, but '{name}' is a {type(layer).__name__}: what it"
                " does beside nn.BatchNorm would be lost. Use nn.BatchNorm1d, 2d or 3d there, or"
                " set trainer.sync_batchnorm=false."
            )
        if getattr(layer, "process_group", None) not in (None, torch.distributed.group.WORLD):
            raise ConfigError(
                "trainer.sync_batchnorm is true, which takes statistics over all ranks, and"
                f" '{name}' is an nn.SyncBatchNorm with a process_group of its own. Leave it out"
                " there to take them over all ranks, or set trainer.sync_batchnorm=false: torch's"
                " layer then takes them over its group."
            )
    for _, layer in layers:
        layer.__class__ = SyncBatchNorm
        assert isinstance(layer, SyncBatchNorm)
        layer.link = RankLink(all_reduce)


def release(model: nn.Module) -> None:
    """Let the layers be plain BatchNorm again: after a run, the other ranks no longer answer."""
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.link = RankLink()


def check_even(plan: StepPlan | None) -> None:
    """Raise ConfigError if a rank would take no part in a microbatch: the others would wait for it
    in their BatchNorm.

    Args:
        plan: of the training data; None for a stream, which has no plan.
    """
    if plan is None:
        raise ConfigError(
            "trainer.sync_batchnorm is true, but the training data is a stream: a rank with a"
            " shorter stream would take no forward, and the others would wait for it. Use a Dataset"
            " of known length, or set trainer.sync_batchnorm=false."
        )
    last = plan.num_steps - 1
    counts = (
        [len(plan.microbatches(last, rank)) for rank in range(plan.world_size)]
        if last >= 0
        else [0]
    )
    if min(counts) != max(counts):
        raise ConfigError(
            "trainer.sync_batchnorm is true, but the last step of an epoch has"
            f" {plan.samples_in(last)} samples for {plan.world_size} ranks, and a rank without a"
            " sample takes no forward: the others would wait for it. Set"
            " trainer.pad_last_step=true, or drop_last=True in the DataLoader, or a batch size"
            " that leaves each one a sample."
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _along(vector_C: Tensor, like_NC: Tensor) -> Tensor:
    """Return a vector over channels in a shape that broadcasts against [N, C, ...]."""
    return vector_C.reshape(1, -1, *[1] * (like_NC.dim() - 2))
