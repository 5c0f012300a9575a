"""torchmetrics objects in `log`: each rank's own state, combined over ranks by the metric's own
rules.

The only file that knows torchmetrics, without importing it. A metric's states define how they
combine (sum, mean, min, max, concatenation, a function of its own), so the value over all ranks is
that of one rank with all samples; a rank without samples takes no part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.transfer import to_device
from trainkit.errors import TaskError

States = list[dict[str, Any]]  # of a metric and the metrics inside it
_MOST_NUMBERS = 1024  # of one logged value


def is_metric(value: Any) -> bool:
    """Return whether a value is a torchmetrics.Metric."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def is_collection(value: Any) -> bool:
    """Return whether a value is a torchmetrics.MetricCollection."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection)


def latest_of(value: Any) -> Any:
    """Return the metric of a MetricTracker's latest increment; any other value as it is."""
    torchmetrics = sys.modules.get("torchmetrics")
    return (
        value[-1]
        if torchmetrics is not None and isinstance(value, torchmetrics.MetricTracker)
        else value
    )


def reset_metrics(model: nn.Module) -> None:
    """Reset all metrics of a model."""
    for module in model.modules():
        if is_metric(module):
            module.reset()  # type: ignore[operator]


def state_of(model: nn.Module, logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this rank's metrics by their place in the model,
    and the logged name of each.
    """
    places = {module: place for place, module in model.named_modules() if is_metric(module)}
    counted = {place: module for module, place in places.items() if module._update_count}
    states = {
        p: (_states(metric), [one._update_count for one in _inner(metric)])
        for p, metric in counted.items()
    }
    return {
        "states": states,
        "logged": {name: places.get(metric) for name, metric in logged.items()},
    }


def restore(
    model: nn.Module,
    logged: dict[str, Any],
    ranks: list[dict[str, Any]],
    rank: int,
    world_size: int,
) -> list[str]:
    """Restore the metrics; at another number of ranks rank 0 takes the states of all.

    Returns:
        In words, the same on all ranks: metrics that are no part of the model, and so were not saved;
        and saved ones that the model lacks, or has of another kind.
    """
    here = {place: module for place, module in model.named_modules() if is_metric(module)}
    saved = {place: own[0] for state in ranks for place, own in state["states"].items()}
    gone = {place for place, states in saved.items() if not _fits(here.get(place), states)}
    own = [ranks[rank]] if len(ranks) == world_size else ranks if rank == 0 else []
    for place in saved.keys() - gone:
        there = [state["states"][place] for state in own if place in state["states"]]
        if not there:
            continue
        metric: Any = here[place]
        for i, one in enumerate(_inner(metric)):
            for name, reduction in one._reductions.items():
                parts = [states[i][name] for states, _ in there]
                if len(parts) == 1 and isinstance(parts[0], Tensor):
                    whole = parts[0].to(metric.device)
                else:
                    whole = _combine(parts, reduction, metric.device)
                setattr(one, name, whole)
            one._update_count = sum(counts[i] for _, counts in there)
            one._computed = None
    for state in own:
        logged |= {
            name: here[place]
            for name, place in state["logged"].items()
            if place in here.keys() - gone
        }
    loose = {name for state in ranks for name, place in state["logged"].items() if place is None}
    hint = "make it an attribute of the Task, and it is saved"
    return [
        *(f"the metric '{name}' ({hint})" for name in sorted(loose)),
        *(f"the state of the metric '{place}'" for place in sorted(gone)),
    ]


def _fits(metric: Any, states: Sequence[Mapping[str, Any]]) -> bool:
    inner = [] if metric is None else _inner(metric)
    names = [one._reductions.keys() for one in inner]
    return names == [state.keys() for state in states]


def metrics_in(model: nn.Module) -> list[Any]:
    """Return the metrics of a model."""
    return [module for module in model.modules() if is_metric(module)]


def remember(metrics: Iterable[Any]) -> Callable[[], None]:
    """Return a function that resets metrics to their present states."""
    held = [
        (one, one._copy_state_dict(), one._update_count, one._to_sync)
        for metric in metrics
        for one in _inner(metric)
    ]

    def undo() -> None:
        for one, states, count, syncs in held:
            for name, value in states.items():
                setattr(one, name, value)
            one._update_count = count
            one._computed = None
            one._to_sync = syncs

    return undo


def step_value(name: str, metric: Any) -> Any:
    """Return a metric's value of the last batch.

    Raises:
        TaskError: `update` was called in place of the metric itself, so there is none.
    """
    value = metric._forward_cache
    if value is None:
        raise TaskError(
            f"log('{name}', metric, on_step=True): the metric has no value of this batch. Call it"
            " (metric(preds, target)) in place of its update(), or log it with on_step=False."
        )
    return value


class EpochMetrics:
    """The metric objects that an epoch updates. While the hooks at its end run, they hold the
    samples of all ranks.

    So `metric.compute()` in on_validation_epoch_end is the value over all ranks, also of a metric
    that is not logged.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` is searched for metrics."""
        self._model = model
        self._before: dict[str, int] = {}
        # metric, undo, whether it is logged
        self._combined: list[tuple[Any, Callable[[], None], bool]] = []
        self._aside: list[tuple[Any, Callable[[], None], bool]] = []

    def begin(self, resumes: bool = False) -> None:
        """Remember which metrics are updated already, as those of training when a validation
        begins.

        Args:
            resumes: whether the epoch has begun before: all updates are its own.
        """
        counts = {
            place: module._update_count
            for place, module in self._model.named_modules()
            if is_metric(module)
        }
        self._before = {} if resumes else counts

    def touched(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's updated metrics by place;
        by "name:" and the logged name if they are no part of the model.
        """
        places = dict[int, str]()
        by_place = dict[str, Any]()
        inside = set[int]()
        for place, module in self._model.named_modules():
            if is_metric(module) and id(module) not in inside:
                inside |= {id(one) for one in _inner(module)}
                places[id(module)] = place
                if module._update_count not in (0, self._before.get(place, 0)):
                    by_place[place] = module
        return by_place | {places.get(id(m), f"name:{name}"): m for name, m in logged.items()}

    def combine(
        self,
        logged: Mapping[str, Any],
        all_gather_object: Callable[[Any], list[Any]],
        keep: bool = False,
    ) -> dict[str, float]:
        """Give the metrics the samples of all ranks; return the values of those that are logged, on
        all ranks.

        Args:
            logged: metrics by logged name.
            all_gather_object: a collective, as is this method.
            keep: give each rank's own samples back now: the epoch is not complete.
        """
        own = self.touched(logged)
        key_of = {
            name: next(key for key, one in own.items() if one is metric)
            for name, metric in logged.items()
        }
        ranks: list[tuple[dict[str, Any], dict[str, str]]] = all_gather_object(
            ({key: (_states(metric), metric._update_count) for key, metric in own.items()}, key_of)
        )
        metrics: dict[str, Any] = {}
        for key in dict.fromkeys(key for states, _ in ranks for key in states):
            metric = own.get(key) if key.startswith("name:") else self._model.get_submodule(key)
            if metric is not None:
                metrics[key] = metric
                is_logged = any(key in names.values() for _, names in ranks)
                self._combined.append((metric, remember([metric]), is_logged))
                _give(metric, [states[key] for states, _ in ranks if key in states])
        values: dict[str, float] = {}
        names = {name: key for _, of_rank in reversed(ranks) for name, key in of_rank.items()}
        for name, key in names.items():
            if key in metrics:
                values |= {
                    full: float(v) for full, v in numbers_of(name, metrics[key].compute()).items()
                }
        # a rank without a batch has none
        if any(key.startswith("name:") for key in names.values()) and len(ranks) > 1:
            values = {
                full: value
                for rank in reversed(all_gather_object(values))
                for full, value in rank.items()
            }
        if keep:
            for _, undo, _ in self._combined:
                undo()
            self._combined.clear()
        return values

    def set_aside(self, of_steps: Collection[int] = ()) -> None:
        """Finish now, since a validation may use the same metrics,
        and remember the samples of all ranks.

        Args:
            of_steps: ids of metrics that are logged by step alone: they are reset too.
        """
        self._combined = [(m, undo, logs or id(m) in of_steps) for m, undo, logs in self._combined]
        self._aside = [(metric, remember([metric]), logs) for metric, _, logs in self._combined]
        self.finish()

    def bring_back(self) -> None:
        """Give the metrics the samples of all ranks again, until they are finished."""
        for metric, give, is_logged in self._aside:
            self._combined.append((metric, remember([metric]), is_logged))
            give()
        self._aside = []

    def finish(self) -> None:
        """Reset the logged metrics, and give the others this rank's own samples back,
        unless a hook has reset them.
        """
        for metric, undo, is_logged in self._combined:
            was_reset = metric._update_count == 0
            undo()
            if is_logged or was_reset:
                metric.reset()
        self._combined.clear()


def epoch_values(
    metrics: Mapping[str, Any], all_gather_object: Callable[[Any], list[Any]], keep: bool = False
) -> dict[str, float]:
    """Return the values of logged metrics over all ranks;
    then reset them, or keep their states. A collective.
    """
    objects = EpochMetrics(nn.Module())
    values = objects.combine(metrics, all_gather_object, keep)
    objects.finish()
    return values


def numbers_of(name: str, value: Any) -> dict[str, Tensor]:
    """Return the numbers of a value by name: `name/class` for a dict, `name/0` for a vector,
    `name/0/1` for a matrix.

    Raises:
        TaskError: there are more than 1,024, or something else than numbers.
    """
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: value.detach().reshape(())}
    if isinstance(value, Tensor) and 0 < value.numel() <= _MOST_NUMBERS:
        return {
            full: number
            for i, part in enumerate(value)
            for full, number in numbers_of(f"{name}/{i}", part).items()
        }
    if isinstance(value, Mapping):
        return {
            full: number
            for key, part in value.items()
            for full, number in numbers_of(f"{name}/{key}", part).items()
        }
    shape = (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    raise TaskError(
        f"log('{name}', ...) got {shape}; a logged value is a number, or a dict or tensor of"
        f" {_MOST_NUMBERS:,} numbers at most. Average it (the metric's average='macro'), or log"
        " each part under a name of its own."
    )


def _inner(metric: Any) -> list[Any]:
    """A metric, and those that it wraps."""
    return [module for module in metric.modules() if is_metric(module)]


def _states(metric: Any) -> States:
    return [
        to_device({name: getattr(one, name) for name in one._defaults}, torch.device("cpu"))
        for one in _inner(metric)
    ]


def _give(metric: Any, ranks: Sequence[tuple[States, int]]) -> None:
    """Give a metric the combined states of ranks."""
    for place, one in enumerate(_inner(metric)):
        for state, reduction in one._reductions.items():
            parts = [states[place][state] for states, _ in ranks]
            setattr(one, state, _combine(parts, reduction, metric.device))
        # else compute() would sum over torch.distributed's ranks once more
        one._computed = None
        one._to_sync = False
    metric._update_count = sum(count for _, count in ranks)


def _combine(parts: list[Any], reduction: Callable[[Any], Any] | None, device: torch.device) -> Any:
    if isinstance(parts[0], Tensor):
        if reduction is None and len(parts) == 1:
            return parts[0].to(device)  # as torchmetrics leaves it in one process
        stacked = torch.stack(parts).to(device)
        return stacked if reduction is None else reduction(stacked)
    # a list of samples: compute() joins it
    return [to_device(item, device) for part in parts for item in part]
