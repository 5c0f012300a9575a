"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): each rank of a group computes a part of
the width of layers.

    colwise    a layer's outputs are split: rank r has the r-th part of them, from all inputs
    rowwise    a layer's inputs are split, and the ranks' results are summed

A colwise layer, what works on each feature (or each head) by itself, and a rowwise layer need one
sum of activations in forward, and one in backward. What no plan names is computed on all ranks of
the group alike, from the same samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainkit.errors import ConfigError

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# along which a plan's own styles split a weight [outputs, inputs]
DIMENSIONS: dict[type, int] = {ColwiseParallel: 0, RowwiseParallel: 1}
_SHOWN = 8


def split_widths(
    task: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | None,
    elsewhere: Collection[nn.Parameter] = (),
) -> None:
    """Split layers over the ranks of `mesh`: those of `plan`, or of the Task's `parallelize(mesh)`.

    Args:
        mesh: of one tensor group, one-dimensional.
        plan: names of layers, or patterns of names -> "colwise" or "rowwise".
        elsewhere: parameters of other pipeline stages; layers that have one stay as they are.

    Raises:
        ConfigError: there is no plan, a name of it is none of the Task's, or a width cannot be
            divided.
    """
    shared = _names_of_shared(task)
    chosen: Any = plan
    if plan is None:
        chosen = task.parallelize(mesh) if hasattr(task, "parallelize") else None  # type: ignore[operator]
    if chosen is not None:
        _apply(
            task,
            mesh,
            chosen,
            elsewhere,
            "engine.tensor_plan" if plan is not None else f"{type(task).__name__}.parallelize",
        )
    if not any(isinstance(parameter, DTensor) for parameter in task.parameters()):
        raise ConfigError(
            f"engine.tensor is {mesh.size()}, and no layer of {type(task).__name__} is split: it"
            " has no plan. Name pairs of layers, as"
            " engine.tensor_plan={model.blocks.*.up:colwise,model.blocks.*.down:rowwise}, or"
            " return such a plan from the Task's parallelize(mesh)."
        )
    _check(task, mesh, shared)


def _apply(
    task: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    elsewhere: Collection[nn.Parameter],
    source: str,
) -> None:
    for _, module, style in layers_of(task, plan, mesh.size(), source):
        if any(parameter in elsewhere for parameter in module.parameters()):
            continue
        # all ranks hold rank 0's weights
        parallelize_module(module, mesh, style, src_data_rank=None)


def layers_of(
    task: nn.Module, plan: Mapping[str, Any], ranks: int, source: str
) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """Yield the layers that a plan splits over `ranks`: name, module and style.

    Args:
        source: of the plan, for errors.

    Raises:
        ConfigError: a name of it is none of the Task's, or a width cannot be divided.
    """
    modules = dict(task.named_modules())
    for pattern, wanted in plan.items():
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            leaves = [
                name
                for name, module in modules.items()
                if isinstance(module, (nn.Linear, nn.Embedding))
            ]
            shown = ", ".join(leaves[:_SHOWN]) + ", ..." * (len(leaves) > _SHOWN)
            raise ConfigError(
                f"{source} names '{pattern}', which is no module of {type(task).__name__}. Its"
                f" layers are {shown}."
            )
        for name in names:
            style = wanted if isinstance(wanted, ParallelStyle) else _style(wanted, pattern, source)
            _require_layer(modules[name], name, wanted, source)
            _require_width(modules[name], name, wanted, ranks)
            yield name, modules[name], style


def _style(wanted: Any, pattern: str, source: str) -> ParallelStyle:
    if wanted not in _STYLES:
        raise ConfigError(
            f"{source} has '{wanted}' for '{pattern}'; it must be colwise or rowwise (or, from"
            " parallelize, a ParallelStyle of torch.distributed.tensor.parallel)."
        )
    return _STYLES[wanted]()


def _require_layer(module: nn.Module, name: str, wanted: Any, source: str) -> None:
    if isinstance(wanted, str) and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ConfigError(
            f"{source} has {wanted} for '{name}', which is a {type(module).__name__}; only Linear"
            " and Embedding layers can be split so. Name the layers inside of it."
        )


def _require_width(module: nn.Module, name: str, wanted: Any, ranks: int) -> None:
    if isinstance(wanted, str) and isinstance(module, nn.Linear):
        what, width = (
            ("outputs", module.out_features)
            if wanted == "colwise"
            else ("inputs", module.in_features)
        )
        if width % ranks:
            raise ConfigError(
                f"engine.tensor is {ranks}, and '{name}' has {width} {what}, which {ranks} ranks"
                " cannot share evenly. Choose engine.tensor so that it divides them, or leave the"
                " layer and its partner out of the plan."
            )


def _check(task: nn.Module, mesh: DeviceMesh, shared: set[frozenset[str]]) -> None:
    """Refuse parameters whose parts differ in size,
    and weights that two layers shared and do no longer.
    """
    for name, parameter in task.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for placement in parameter.placements:
            if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
                raise ConfigError(
                    f"engine.tensor is {mesh.size()}, and '{name}' of shape {list(parameter.shape)}"
                    f" is split along dimension {placement.dim}, which {mesh.size()} ranks cannot"
                    " share evenly. Choose engine.tensor so that it divides"
                    f" {parameter.shape[placement.dim]}, or leave the layer out of the plan."
                )
    if lost := sorted(map(sorted, shared - _names_of_shared(task))):
        raise ConfigError(
            f"The plan of engine.tensor={mesh.size()} splits a weight that two layers share"
            f" ({' and '.join(lost[0])}): they would train apart. Leave both layers out of the"
            " plan."
        )


def _names_of_shared(task: nn.Module) -> set[frozenset[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in task.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {frozenset(own) for own in names.values() if len(own) > 1}
