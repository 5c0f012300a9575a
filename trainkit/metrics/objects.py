"""torchmetrics objects in `log`: each rank's own state, combined over ranks by the metric's own rules.

The only file that knows torchmetrics, without importing it. A metric's states define how they combine (sum, mean, min, max,
concatenation, a function of its own), so the value over all ranks is that of one rank with all samples; a rank without
samples takes no part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.transfer import to_device
from trainkit.errors import TaskError

States = list[dict[str, Any]]  # of a metric and the metrics inside it


def is_metric(value: Any) -> bool:
    """Return whether a value is a torchmetrics.Metric."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def reset_metrics(model: nn.Module) -> None:
    """Reset all metrics of a model."""
    for module in model.modules():
        if is_metric(module):
            module.reset()  # type: ignore[operator]


def state_of(model: nn.Module, logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this rank's metrics by their place in the model, and the logged name of each."""
    places = {module: place for place, module in model.named_modules() if is_metric(module)}
    counted = {place: module for module, place in places.items() if module._update_count}
    states = {p: (_states(metric), [one._update_count for one in _inner(metric)]) for p, metric in counted.items()}
    return {"states": states, "logged": {name: places.get(metric) for name, metric in logged.items()}}


def restore(model: nn.Module, logged: dict[str, Any], ranks: list[dict[str, Any]], rank: int, world_size: int) -> list[str]:
    """Restore the metrics; at another number of ranks rank 0 takes the states of all.

    Returns:
        The logged names of metrics that are no part of the model, and so were not saved.
    """
    own = [ranks[rank]] if len(ranks) == world_size else ranks if rank == 0 else []
    for place in dict.fromkeys(place for state in own for place in state["states"]):
        there = [state["states"][place] for state in own if place in state["states"]]
        metric: Any = model.get_submodule(place)
        for i, one in enumerate(_inner(metric)):
            for name, reduction in one._reductions.items():
                parts = [states[i][name] for states, _ in there]
                alone = len(parts) == 1 and isinstance(parts[0], Tensor)
                setattr(one, name, parts[0].to(metric.device) if alone else _combine(parts, reduction, metric.device))
            one._update_count, one._computed = sum(counts[i] for _, counts in there), None
    for state in own:
        logged |= {name: model.get_submodule(place) for name, place in state["logged"].items() if place is not None}
    return sorted({name for state in ranks for name, place in state["logged"].items() if place is None})


def metrics_in(model: nn.Module) -> list[Any]:
    """Return the metrics of a model."""
    return [module for module in model.modules() if is_metric(module)]


def remember(metrics: Iterable[Any]) -> Callable[[], None]:
    """Return a function that resets metrics to their present states."""
    held = [(one, one._copy_state_dict(), one._update_count) for metric in metrics for one in _inner(metric)]

    def undo() -> None:
        for one, states, count in held:
            for name, value in states.items():
                setattr(one, name, value)
            one._update_count, one._computed = count, None

    return undo


def step_value(name: str, metric: Any) -> Tensor:
    """Return a metric's value of the last batch.

    Raises:
        TaskError: `update` was called in place of the metric itself, so there is none.
    """
    value = metric._forward_cache
    if value is None:
        raise TaskError(
            f"log('{name}', metric, on_step=True): the metric has no value of this batch. Call it (metric(preds, target)) in "
            "place of its update(), or log it with on_step=False."
        )
    return _one_number(name, metric, value)


def epoch_values(
    metrics: Mapping[str, Any], all_gather_object: Callable[[Any], list[Any]], keep: bool = False
) -> dict[str, float]:
    """Return the values over all ranks, on all ranks; then reset the metrics, or keep their states.

    A collective if any rank has a metric.
    """
    undo = remember(metrics.values())
    own: dict[str, States] = {name: _states(metric) for name, metric in metrics.items()}
    ranks: list[dict[str, States]] = all_gather_object(own)
    names = dict.fromkeys(name for rank in ranks for name in rank)
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values[name] = _combined(name, metric, [rank[name] for rank in ranks if name in rank])
    if keep:
        undo()
    if any(len(rank) < len(names) for rank in ranks):  # a rank without a batch has none
        values = {name: value for rank in reversed(all_gather_object(values)) for name, value in rank.items()}
    return {name: values[name] for name in names}


def _inner(metric: Any) -> list[Any]:
    """A metric, and those that it wraps."""
    return [module for module in metric.modules() if is_metric(module)]


def _states(metric: Any) -> States:
    return [to_device({name: getattr(one, name) for name in one._defaults}, torch.device("cpu")) for one in _inner(metric)]


def _combined(name: str, metric: Any, ranks: Sequence[States]) -> float:
    alone = [(one, one._to_sync) for one in _inner(metric)]
    for place, (one, _) in enumerate(alone):
        for state, reduction in one._reductions.items():
            setattr(one, state, _combine([rank[place][state] for rank in ranks], reduction, metric.device))
        one._computed, one._to_sync = None, False  # else it would sum over torch.distributed's ranks once more
    value = metric.compute()
    metric.reset()
    for one, before in alone:
        one._to_sync = before
    return float(_one_number(name, metric, value))


def _combine(parts: list[Any], reduction: Callable[[Any], Any] | None, device: torch.device) -> Any:
    if isinstance(parts[0], Tensor):
        if reduction is None and len(parts) == 1:
            return parts[0].to(device)  # as torchmetrics leaves it in one process
        stacked = torch.stack(parts).to(device)
        return stacked if reduction is None else reduction(stacked)
    return [tensor.to(device) for part in parts for tensor in part]  # a list of samples: compute() joins it


def _one_number(name: str, metric: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TaskError(
        f"log('{name}', ...): {type(metric).__name__}.compute() gave {shape}; a logged value is one number. Average it (the "
        "metric's average='macro'), or log each part under a name of its own."
    )
