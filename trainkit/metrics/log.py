"""The values of `log`: step values of this rank, and epoch values that are exact over all samples
of all ranks.

Nothing here waits for the device while steps run. Values stay on their device until they are read:
step values at log_every_n_steps, epoch values at the end of an epoch, when one gather over ranks
combines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trainkit.device.accelerator import wide
from trainkit.errors import TaskError
from trainkit.metrics import objects as metric_objects
from trainkit.metrics.objects import EpochMetrics

Reduction = Literal["mean", "sum", "min", "max"]
REDUCTIONS = get_args(Reduction)
_OF_TORCH = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max"}


def reduction_of(given: Any) -> Any:
    """Return the name of a reduction that may be given as torch's function;
    anything else as it is.
    """
    return _OF_TORCH.get(given, given) if callable(given) else given


# A device's values are folded into one after this many, to bound memory and the number of kernels.
_FOLD_AT = 64


Reading = tuple[Reduction, float, float]  # reduction, combined value, weight


class Accumulator:
    """Combines the values of one name on this rank."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._pending: dict[float, list[Tensor]] = {}
        self._held = 0
        self._parts: list[Tensor] = []
        self._numbers: list[float] = []
        self._weight = 0.0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Add a value. Its weight counts for means only."""
        weight = weight if self.reduction == "mean" else 1.0
        self._weight += weight
        if isinstance(value, Tensor):
            self._pending.setdefault(weight, []).append(value)
            self._held += 1
            if self._held >= _FOLD_AT:
                self._fold()
        else:
            self._numbers.append(value * weight)
            if len(self._numbers) >= _FOLD_AT:
                self._numbers = [self._combine(self._numbers)]

    def copy(self) -> Accumulator:
        """Return an independent copy."""
        other = Accumulator(self.reduction)
        other._pending = {weight: list(values) for weight, values in self._pending.items()}
        other._held, other._weight = self._held, self._weight
        other._parts, other._numbers = list(self._parts), list(self._numbers)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the values unfolded, so a resumed run gets the same bits;
        on the host, which waits for the device.
        """
        pending = [(weight, _pack(values)) for weight, values in self._pending.items()]
        state = {"pending": pending, "parts": _pack(self._parts), "numbers": list(self._numbers)}
        return state | {"reduction": self.reduction, "held": self._held, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore them."""
        self._pending = {weight: _unpack(values, device) for weight, values in state["pending"]}
        self._parts, self._numbers = _unpack(state["parts"], device), list(state["numbers"])
        self._held, self._weight = state["held"], state["weight"]

    def absorb(self, other: Accumulator) -> None:
        """Add the values of another rank's accumulator."""
        _, value, weight = read_all({"": other})[""]
        self._numbers.append(value)
        self._weight += weight

    def parts(self) -> list[Tensor]:
        """Return the values on a device, folded: none or one scalar, float64 if it has that."""
        self._fold()
        return self._parts

    def reading(self, parts: list[float]) -> Reading:
        """Return the combined value; `parts` are those on the device, read."""
        return self.reduction, self._combine(parts + self._numbers), self._weight

    def _fold(self) -> None:
        for weight, values in self._pending.items():
            stacked = torch.stack(values)
            stacked = stacked.to(wide(stacked.device))
            self._parts.append(self._combine_tensor(stacked * weight))
        if len(self._parts) > 1:
            self._parts = [self._combine_tensor(torch.stack(self._parts))]
        self._pending.clear()
        self._held = 0

    def _combine_tensor(self, values: Tensor) -> Tensor:
        if self.reduction == "min":
            return values.min()
        return values.max() if self.reduction == "max" else values.sum()

    def _combine(self, values: list[float]) -> float:
        return _combined(self.reduction, values)


def _combined(reduction: Reduction, values: list[float]) -> float:
    """Return the least, the largest or the sum;
    NaN if one is NaN, as for tensors, and if infinities cancel out.
    """
    if any(math.isnan(value) for value in values):
        return math.nan
    if reduction == "min":
        return min(values, default=math.inf)
    if reduction == "max":
        return max(values, default=-math.inf)
    return math.fsum(values) if all(math.isfinite(value) for value in values) else sum(values)


def read_all(table: Mapping[str, Accumulator]) -> dict[str, Reading]:
    """Read all values; waits once for each device."""
    parts = {name: held.parts() for name, held in table.items()}
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in (part for own in parts.values() for part in own):
        by_device.setdefault(part.device, []).append(part)
    read = {device: iter(torch.stack(held).tolist()) for device, held in by_device.items()}
    return {
        name: table[name].reading([next(read[part.device]) for part in own])
        for name, own in parts.items()
    }


def _pack(values: list[Tensor]) -> tuple[str, Tensor] | None:
    """Return tensors of one number as (kind of device, one tensor of the host)."""
    return (values[0].device.type, torch.stack(values).cpu()) if values else None


def _unpack(packed: tuple[str, Tensor] | None, device: torch.device) -> list[Tensor]:
    if packed is None:
        return []
    kind, values = packed
    if values.dtype == torch.float64 and kind != "cpu":
        values = values.to(wide(device))
    return list((values if kind == "cpu" else values.to(device)).unbind())


def combine(parts: list[Reading]) -> float:
    """Combine the readings of all ranks that have one into the value of the epoch."""
    reduction = parts[0][0]
    values = [value for _, value, _ in parts]
    total = _combined(reduction, values)
    if reduction != "mean":
        return total
    weight = math.fsum(weight for _, _, weight in parts)
    return total / weight if weight else math.nan


class MetricLog:
    """The values logged in one epoch of training, or in one evaluation."""

    def __init__(self, suffix: str = "") -> None:
        """`suffix` is appended to every name (evaluation on several loaders)."""
        self.suffix = suffix
        self.prog_bar: set[str] = set()
        self._epoch: dict[str, Accumulator] = {}
        self._step: dict[str, Accumulator] = {}
        self._is_read = True  # whether the step values of this step are read
        # names of step values without epoch values, of steps that are not read
        self.unread: set[str] = set()
        self.read: set[str] = set()  # names of step values that were
        self.objects: dict[str, Any] = {}  # torchmetrics objects: they accumulate by themselves
        self.of_steps: dict[int, Any] = {}  # those that are logged by step alone

    def add(
        self,
        name: str,
        value: Any,
        *,
        weight: float,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool = False,
        reduction: Reduction = "mean",
        has_suffix: bool = True,
    ) -> None:
        """Add a value, or a torchmetrics object, which is computed when the epoch ends.

        Raises:
            TaskError: the value is not a number or a tensor of one element, or the reduction is
                unknown or changed.
        """
        suffix = self.suffix if has_suffix else ""
        has_epoch = on_epoch
        if not isinstance(value, Tensor) and metric_objects.is_metric(value):
            metric, full = value, f"{name}_epoch" if on_step and on_epoch else name
            if on_epoch and self.objects.setdefault(full + suffix, metric) is not metric:
                raise TaskError(
                    f"log('{name}', ...) got another metric object than before. Log each under its"
                    " own name."
                )
            if on_epoch and prog_bar:
                self.prog_bar.add(full + suffix)
            if not on_step:
                return
            if not on_epoch:
                self.of_steps[id(metric)] = metric
            value, on_epoch = metric_objects.step_value(name, metric), False
            name = f"{name}_step" if full != name else name
        if not isinstance(value, (int, float)) and not (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            for part, number in metric_objects.numbers_of(name, value).items():
                how: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch}
                how |= {"prog_bar": prog_bar, "reduction": reduction, "has_suffix": has_suffix}
                self.add(part, number, weight=weight, **how)
            return
        if reduction not in REDUCTIONS:
            legal = ", ".join(f"'{known}'" for known in REDUCTIONS)
            raise TaskError(
                f"log('{name}', ...): reduce_fx is '{reduction}'; it must be one of {legal}."
            )
        if not on_epoch and not (on_step and self._is_read):
            if on_step and not has_epoch:
                self.unread.add(name + suffix)
            return
        if isinstance(value, Tensor):
            value = value.detach().clone()  # a copy: the caller may keep writing into it
            value = value.reshape(()) if value.dim() else value
        step_name, epoch_name = (
            (f"{name}_step", f"{name}_epoch") if on_step and on_epoch else (name, name)
        )
        for wanted, full, table in (
            (on_step and self._is_read, step_name + suffix, self._step),
            (on_epoch, epoch_name + suffix, self._epoch),
        ):
            if wanted:
                held = table.get(full)
                if held is None:
                    held = table[full] = Accumulator(reduction)
                elif held.reduction != reduction:
                    raise TaskError(
                        f"log('{name}', ...): reduce_fx is '{reduction}', and was"
                        f" '{held.reduction}' before. Log it under another name."
                    )
                held.add(value, weight)
                if prog_bar:
                    self.prog_bar.add(full)

    def copy(self) -> MetricLog:
        """Return an independent copy; the names for the progress bar stay shared."""
        other = MetricLog(self.suffix)
        other.prog_bar = self.prog_bar
        other.objects = dict(self.objects)
        other._is_read = self._is_read
        other.unread, other.read = self.unread, self.read
        other.of_steps = self.of_steps
        other._epoch = {name: held.copy() for name, held in self._epoch.items()}
        other._step = {name: held.copy() for name, held in self._step.items()}
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values of the epoch;
        metric objects are saved with their Task (objects.py).
        """
        return {
            "epoch": {n: held.state_dict() for n, held in self._epoch.items()},
            "prog_bar": sorted(self.prog_bar),
        }

    def load_state_dict(
        self, ranks: list[dict[str, Any]], rank: int, world_size: int, device: torch.device
    ) -> None:
        """Restore the ranks' values; at another number of ranks rank 0 takes them all."""
        own = [ranks[rank]] if len(ranks) == world_size else ranks if rank == 0 else []
        for state in own:
            self.prog_bar |= set(state["prog_bar"])
            for name, saved in state["epoch"].items():
                held = Accumulator(saved["reduction"])
                held.load_state_dict(saved, device)
                if name in self._epoch:
                    self._epoch[name].absorb(held)
                else:
                    self._epoch[name] = held

    def new_step(self, is_read: bool = True) -> None:
        """Drop the step values and begin a step;
        its values are collected only if they are read at its end.
        """
        self._is_read = is_read
        if self._step:
            self._step.clear()

    def step_values(self) -> dict[str, float]:
        """Return this rank's values of the step. Waits for the device, once for all."""
        self.read |= self._step.keys()
        return {name: combine([reading]) for name, reading in read_all(self._step).items()}

    def epoch_values(
        self,
        all_gather_object: Callable[[Any], list[Any]],
        keep: bool = False,
        objects: EpochMetrics | None = None,
    ) -> dict[str, float]:
        """Return the values over all samples of all ranks, on all ranks. Waits for the device.

        Args:
            all_gather_object: returns the values of all ranks.
            keep: continue collecting; otherwise clear all values.
            objects: the Task's, which hold the samples of all ranks until finished. Default: those
                logged, reset now.
        """
        own = read_all(self._epoch)
        has_objects = bool(self.objects if objects is None else objects.touched(self.objects))
        gathered: list[tuple[dict[str, Reading], bool]] = all_gather_object((own, has_objects))
        names = dict.fromkeys(name for rank, _ in gathered for name in rank)
        values = {
            name: combine([rank[name] for rank, _ in gathered if name in rank]) for name in names
        }
        if any(has for _, has in gathered):
            table = metric_objects.epoch_values if objects is None else objects.combine
            values |= table(self.objects, all_gather_object, keep)
        if not keep:
            self._epoch.clear()
            self.objects.clear()
        return values
