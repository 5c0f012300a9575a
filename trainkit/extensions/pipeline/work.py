"""UnitWork: the operations of each unit in a step's forward, counted from the shapes of one sample, and
what would travel if a stage began with it.

The whole step runs once, as on a stage that holds none of the units: each computes the shapes of
its outputs, on a copy of the Task whose weights have no memory. So a model that does not fit a rank
is counted too, and nothing of the Task changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget
from trainkit.errors import TaskError
from trainkit.extensions.fsdp.random_numbers import numbers_of
from trainkit.extensions.pipeline.placeholder import (
    Placeholder,
    placeholder,
)
from trainkit.extensions.pipeline.units import named_units, work_of
from trainkit.metrics.log import MetricLog

Named = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class UnitWork:
    """The work of units, in their order.

    Attributes:
        operations: multiplications and additions of a sample's forward; the last unit has those
            outside of units too.
        entering: bytes of a sample that a unit takes from the units before it.
    """

    operations: Sequence[int]
    entering: Sequence[int]


def count_work(task: nn.Module, units: Named, batch: Any, device: torch.device) -> UnitWork:
    """Count the work of one sample.

    Args:
        units: modules of the Task, by name.
        batch: of one sample.
        device: of this rank.

    Raises:
        TaskError: the step needs values that are not there, before all units are called.
    """
    counted = copied(task, units)
    for module in counted.modules():
        if isinstance(module, _BatchNorm):
            module.eval()  # it takes no single sample
    with FlopCounterMode(display=False) as counter:
        meter = _Meter(device, counter)
        for place, (name, _) in enumerate(units):
            own = counted.get_submodule(name)
            own.forward = functools.partial(meter.call, place, own.forward)
        try:
            with torch.no_grad(), numbers_of(0):
                call_step(counted, "training_step", batch, 0)
        except Exception as error:  # any: a loss may ask for values, after all layers
            missing = [unit for place, unit in enumerate(units) if place not in meter.entering]
            if any(work_of(module) for _, module in missing):
                raise TaskError(f"{type(error).__name__}: {error}") from error
        total = counter.get_total_flops()
    if not total:
        raise TaskError("no layer multiplies matrices")
    operations = [meter.operations.get(place, 0) for place in range(len(units))]
    operations[-1] += total - sum(operations)  # between layers, as a head of the table's weight
    return UnitWork(
        operations,
        [meter.entering.get(place, 0) for place in range(len(units))],
    )


def try_to_count(
    task: nn.Module, sample: Callable[[], Any], device: torch.device
) -> tuple[UnitWork | None, str]:
    """Return the work of a Task's units, or None and the reason, in a sentence.

    Args:
        sample: returns a batch of one sample.
    """
    try:
        batch = sample()
        return count_work(task, named_units(task), batch, device), ""
    except Exception as error:  # any: a data set's; training meets it, and names it
        return None, (
            "Pipeline stages are cut by weights, since the work of a sample could not be counted"
            f" ({error})."
        )


class _Meter:
    """Counts calls of units, by their places."""

    def __init__(self, device: torch.device, counter: FlopCounterMode) -> None:
        self._device = device
        self._counter = counter
        self.operations: dict[int, int] = {}
        self.entering: dict[int, int] = {}

    def call(
        self,
        place: int,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Count a unit's forward, and return placeholders."""
        handed = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if _travels(leaf)}
        self.entering.setdefault(place, sum(leaf.nbytes for leaf in handed.values()))
        without_values = functools.partial(placeholder, device=self._device)
        args, kwargs = tree_map(without_values, (args, kwargs))
        before = self._counter.get_total_flops()
        outputs = forward(*args, **kwargs)
        own = self._counter.get_total_flops() - before
        self.operations[place] = self.operations.get(place, 0) + own
        return tree_map(without_values, outputs)


def _travels(leaf: Any) -> bool:
    return type(leaf) is Placeholder


def copied(task: nn.Module, units: Named) -> Any:
    """Return a copy of a Task whose units have weights without memory, and which logs to nowhere.

    Raises:
        TaskError: it cannot be copied.
    """
    weights = {parameter for _, module in units for parameter in module.parameters()}
    blank = {
        id(own): nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad)
        for own in weights
    }
    try:
        made: Any = copy.deepcopy(task, blank)
    except Exception as error:  # any: what the user's objects raise that are not to be copied
        raise TaskError(f"a copy of it fails: {error}") from error
    if hasattr(task, "_trainer"):
        made._trainer = task._trainer
    if hasattr(task, "_log_to"):
        made._log_to(LogTarget(MetricLog(), 1, on_step=True, on_epoch=False))
    return made
