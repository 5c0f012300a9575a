"""Weights and optimizer state of a model that DeepSpeed has split: whole on rank 0, in the layout
of torch; and back.

DeepSpeed replaces the parameters in the optimizer's groups by flat pieces, and in stage 3 the data
of each parameter by an empty tensor. What they were is noted before, so that a checkpoint has
torch's layout and the Task can be made whole again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import CheckpointError
from trainkit.extensions.deepspeed.adapter import Zero, is_split


class WholeState:
    """What a Task and its optimizer were before DeepSpeed took them.

    Args:
        task: the Task.
        optimizer: its optimizer, with the state to continue from, whole.
    """

    def __init__(self, task: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._task = task
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._keys = [[key for key in group if key != "params"] for group in optimizer.param_groups]
        self._of_parameters = {parameter: set(vars(parameter)) for parameter in task.parameters()}
        self._of_modules = {module: set(vars(module)) for module in task.modules()}
        self._states: dict[Tensor, dict[str, Any]] = dict(optimizer.state)
        optimizer.state.clear()

    def trained(self) -> list[tuple[int, int, nn.Parameter]]:
        """Return the parameters that the optimizer updates: index, group, parameter.
        Frozen ones only have an index.
        """
        parameters_of_groups = []
        index = 0
        for number, group in enumerate(self._groups):
            for parameter in group:
                if parameter.requires_grad:
                    parameters_of_groups.append((index, number, parameter))
                index += 1
        return parameters_of_groups

    # -- state of the optimizer -------------------------------------------------------------------------------------

    def hand_over(self, zero: Zero) -> None:
        """Give each rank its part of the state that the optimizer had.

        Raises:
            CheckpointError: parameters of one group have taken different numbers of steps.
        """
        counts: dict[int, set[float]] = {}
        for _, group, parameter in self.trained():
            state = self._states.get(parameter, {})
            if "step" in state:
                counts.setdefault(group, set()).add(float(state["step"]))
            for key, value in state.items():
                if value is not None:
                    zero.set_state(parameter, group, key, value)
        if differing := [sorted(steps) for steps in counts.values() if len(steps) > 1]:
            raise CheckpointError(
                f"Parameters of one group of the optimizer have taken {differing[0]} steps, and"
                " DeepSpeed counts the steps of a group once. Continue this run with the engine"
                " that it was started with."
            )
        self._states.clear()

    def optimizer_state(
        self, zero: Zero, total: Callable[[Tensor], Tensor], is_kept: bool
    ) -> dict[str, Any]:
        """Return the optimizer's state_dict, whole and on the host. Call it on all ranks.

        Args:
            zero: the engine that holds it.
            total: returns the sum of a tensor over ranks.
            is_kept: whether this rank needs the result; the others get the settings alone.
        """
        state: dict[int, dict[str, Any]] = {}
        for index, group, parameter in self.trained():
            own: dict[str, Any] = {}
            for key, value in sorted(zero.state_here(parameter, group).items()):
                if zero.is_flat(parameter, group, value):
                    value = zero.whole_state(parameter, group, key, total)
                own[key] = on_host(value) if is_kept and isinstance(value, Tensor) else value
            if own and is_kept:
                state[index] = own
        return {"state": state, "param_groups": self._settings()}

    def _settings(self) -> list[dict[str, Any]]:
        first = 0
        groups = []
        for group, keys, parameters in zip(
            self._optimizer.param_groups, self._keys, self._groups, strict=True
        ):
            settings = {key: group[key] for key in keys}
            groups.append(settings | {"params": list(range(first, first + len(parameters)))})
            first += len(parameters)
        return groups

    # -- weights ----------------------------------------------------------------------------------------------------

    def model_state(self, zero: Zero, is_kept: bool) -> dict[str, Tensor]:
        """Return the Task's weights and buffers, whole; split ones on the host.
        Call it on all ranks; see optimizer_state.
        """
        whole: dict[int, Tensor] = {}  # a tied weight once
        for parameter in self._task.parameters():
            if is_split(parameter):
                value = zero.whole(parameter)
                if is_kept:
                    whole[id(parameter)] = on_host(value)
        state: dict[str, Tensor] = self._task.state_dict(keep_vars=True)
        return (
            {name: whole.get(id(value), value.detach()) for name, value in state.items()}
            if is_kept
            else {}
        )

    def make_whole(self, zero: Zero, gathers: bool) -> None:
        """Take DeepSpeed off the Task and the optimizer.

        Args:
            zero: the engine that held them.
            gathers: whether split weights are gathered, onto the host. Not after an error: the
                other ranks may be gone.
        """
        split = [parameter for parameter in self._of_parameters if is_split(parameter)]
        whole = (
            {parameter: on_host(zero.whole(parameter)) for parameter in split} if gathers else {}
        )
        zero.end()
        for parameter, value in whole.items():
            parameter.data = value
        for module, names in self._of_modules.items():
            # DeepSpeed's own kind gathers at each access
            module._parameters = dict(module._parameters)
            for name in [
                name for name in vars(module) if name not in names and _is_deepspeeds(name)
            ]:
                delattr(module, name)
        if split and not gathers:
            return  # they stay empty, and DeepSpeed's marks say so
        for parameter, names in self._of_parameters.items():
            for name in [name for name in vars(parameter) if name not in names]:
                delattr(parameter, name)
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._optimizer.state.clear()


def on_host(value: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return value.detach().to("cpu", copy=True)


def _is_deepspeeds(name: str) -> bool:
    return name.startswith(("ds_", "_ds_", "_z3_")) or name in (
        "_external_params",
        "_original_parameters",
        "_original_class",
    )
