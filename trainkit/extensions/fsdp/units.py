"""FSDP2's units in a Task, the modules whose weights are gathered one at a time; and a stage that
has none.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from trainkit.engine.collectives import Collectives, PeerError
from trainkit.engine.ddp.collectives import blames_peer
from trainkit.engine.pieces import Piece
from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.fsdp.layouts import STAGE

# torch's errors of a product, a convolution and a backward
_MIXED = re.compile(r"same dtype|expected scalar type|Found dtype|type \(.*\) should be the same")


def units_of(task: nn.Module) -> Iterator[FSDPModule]:
    """Yield each."""
    yield from (module for module in task.modules() if isinstance(module, FSDPModule))


def is_split(task: nn.Module) -> bool:
    """Return whether the weights of a Task are split over ranks, or over stages."""
    return isinstance(task, FSDPModule) or any(STAGE in vars(own) for own in task.modules())


def give_memory(
    task: nn.Module,
    elsewhere: set[nn.Parameter],
    device: torch.device,
) -> None:
    """Give memory to weights that have none, and are not those of other stages."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in task.modules():
        for name, own in module._parameters.items():
            if own is None or not own.is_meta or own in elsewhere:
                continue
            if own not in made:
                made[own] = nn.Parameter(
                    torch.empty_like(own, device=device),
                    own.requires_grad,
                )
            module._parameters[name] = made[own]


def split_units(
    task: nn.Module,
    blocks: Iterable[nn.Module],
    elsewhere: set[nn.Parameter],
    options: Mapping[str, Any],
) -> None:
    """Split the weights of each block, and the rest.

    Args:
        elsewhere: weights of other stages.
        options: of fully_shard. With a `param_dtype` the inputs of modules are cast to it: those of
            blocks by FSDP2, and those of modules whose weights are in the last group here. FSDP2
            would cast the inputs of that group's module, the Task, which are the whole batch:
            targets would be rounded.
    """
    own = [block for block in blocks if elsewhere.isdisjoint(block.parameters())]
    modules = [*without_shared(task, own), task]
    refuse_weights(task, modules, elsewhere)
    policy: MixedPrecisionPolicy = options["mp_policy"]
    if policy.param_dtype is not None:
        inner = {weight for module in modules[:-1] for weight in module.parameters()}
        for module in task.modules():
            if not (inner | elsewhere).issuperset(module.parameters(recurse=False)):
                cast = functools.partial(_cast_inputs, dtype=policy.param_dtype)
                module.register_forward_pre_hook(cast, with_kwargs=True)
    policies = dict.fromkeys(modules, policy)
    policies[task] = dataclasses.replace(policy, cast_forward_inputs=False)
    for module in modules:
        fully_shard(module, ignored_params=elsewhere, **{**options, "mp_policy": policies[module]})
    _set_up_units(task)


def _cast_inputs(
    module: nn.Module, args: Any, kwargs: dict[str, Any], *, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    def cast(value: Any) -> Any:
        casts = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if casts else value

    return tree_map(cast, args), tree_map(cast, kwargs)


def refuse_weights(
    task: nn.Module, modules: Sequence[nn.Module], elsewhere: set[nn.Parameter]
) -> None:
    """Refuse a unit whose weights have several dtypes, since FSDP2 gathers them as one tensor; and
    scalars, which it cannot split.

    Args:
        modules: of the units, inner ones first.

    Raises:
        ConfigError: names a weight of each dtype, or the scalar.
    """
    taken = set(elsewhere)
    names = {weight: name for name, weight in task.named_parameters()}
    for module in modules:
        own = [weight for weight in module.parameters() if weight not in taken]
        taken.update(own)
        if scalar := next((names[weight] for weight in own if weight.ndim == 0), None):
            raise ConfigError(
                f"engine is fsdp, and '{scalar}' is a scalar, which cannot be split over ranks. Make"
                " it a tensor with one element, nn.Parameter(torch.zeros(1)), or use engine=ddp."
            )
        dtypes = {weight.dtype: names[weight] for weight in own if weight.requires_grad}
        if len(dtypes) > 1:
            (one, name), (other, another) = list(dtypes.items())[:2]
            raise ConfigError(
                f"engine is fsdp, and '{name}' is {one}, '{another}' is {other}: weights that are"
                " gathered at a time must have one dtype. Convert the model, as model.float() with"
                " trainer.precision=bf16-mixed, or use engine=ddp."
            )


def _set_up_units(task: nn.Module) -> None:
    """Let units sum gradients as they are, and have the names of the user's classes."""
    for module in units_of(task):
        # made by fully_shard: FSDPModule, then the user's class; messages show its name
        kind = type(module)
        kind.__name__ = kind.__mro__[2].__name__
        kind.__qualname__ = kind.__mro__[2].__qualname__
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # from torch 2.14; before, ranks must use the same
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)


class _Waiting:
    """One of FSDP2's collectives; a rank that waits in it says so."""

    def __init__(self, comm: Collectives, what: str) -> None:
        self._comm, self._what = comm, what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See AllGather and ReduceScatter."""
        with self._comm.waiting_for(self._what):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _AllGather(_Waiting, DefaultAllGather):
    """See _Waiting."""


class _ReduceScatter(_Waiting, DefaultReduceScatter):
    """See _Waiting."""


def report_waits(unit: FSDPModule, comm: Collectives) -> None:
    """Let a rank that waits for another one's weights or gradients report it, so that the driver of
    an elastic job finds the one that hangs.
    """
    unit.set_custom_all_gather(_AllGather(comm, "the weights of the other ranks"))
    unit.set_custom_reduce_scatter(_ReduceScatter(comm, "the gradients of the other ranks"))


def reshard(units: Iterable[FSDPModule]) -> None:
    """Drop gathered weights: they are copies of parts that are about to change."""
    for unit in units:
        unit.reshard()


def resharding(call: Callable[..., Any], units: Sequence[FSDPModule]) -> Callable[..., Any]:
    """Return a call after which no weights are gathered: callbacks may change parts, as averages
    do.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            reshard(units)

    return called


def explaining_dtypes(call: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Return a call whose error of mixed dtypes says that weights have `engine.param_dtype`, if
    there is one, and the batch has its own.
    """
    if name is None:
        return call

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not _MIXED.search(str(error)):
                raise
            raise TaskError(
                f"engine.param_dtype is '{name}': modules and weights compute in it; the batch, and"
                " buffers as a batch norm's, stay what they are. Both meet where torch takes one:"
                f" {error}. Convert what the loss takes, as `self.model(x).float()`, and what a"
                " weight is multiplied with, as `x.to(self.weight.dtype)`; or set"
                " trainer.precision=bf16-mixed instead, as for a batch norm on a CPU."
            ) from error

    return called


def reporting_peers(call: Callable[..., Any], ranks: Ranks) -> Callable[..., Any]:
    """Return a call in which the error of a collective is a PeerError: its cause is reported by the
    rank that is gone. It ends this rank's replica, too: FSDP2 cannot leave a forward or a backward
    in its midst, and be used again.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except PeerError:
            ranks.lose_replica()
            raise
        except RuntimeError as error:
            if blames_peer(error):
                ranks.lose_replica()
                raise PeerError(f"Another rank ended: {error}") from error
            raise

    return called


def part_of(
    tensor: DTensor,
    ranks: Ranks,
    is_first_replica: bool,
) -> Piece:
    """Return this rank's part.

    Args:
        is_first_replica: whether no other replica of all weights comes before this rank's.
    """
    mesh = tensor.device_mesh
    placements = tensor.placements
    shape, at = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place: Sequence[int] = mesh.get_coordinate() or []
    is_first = is_first_replica and all(
        i == 0 for i, placement in zip(place, placements, strict=True) if placement.is_replicate()
    )
    is_first = is_first and (
        "tensor" in (mesh.mesh_dim_names or ()) or ranks.rank % ranks.tensor_size == 0
    )
    return Piece(
        tensor.to_local(),
        tuple(at),
        tuple(tensor.shape),
        is_first and 0 not in shape,
    )


def without_shared(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out modules that share a parameter with a module outside of them."""
    homes: Counter[int] = Counter()
    for module in model.modules():
        homes.update(id(parameter) for parameter in module.parameters(recurse=False))
    inside = [
        Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        for module in modules
    ]
    return [
        module
        for module, own in zip(modules, inside, strict=True)
        if all(homes[key] == n for key, n in own.items())
    ]
