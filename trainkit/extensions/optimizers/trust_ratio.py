"""Shared by LARS and LAMB: a step by groups, the parameters with a rate of their own, and the ratio
of two norms.

Nothing here waits for the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.device.shards import local_of
from trainkit.errors import ConfigError

ADAPT = ("matrices", "all", "none")


class LayerwiseOptimizer(Optimizer):
    """An optimizer that steps group by group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights; never waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            if parameters:
                self._update(group, parameters, gradients)
        return loss

    @abstractmethod
    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Update the parameters of a group; there is one at least."""


def check_group(owner: str, group: dict[str, Any], ranges: dict[str, tuple[float, float]]) -> None:
    """Check the options of a parameter group by `ranges`: name -> (least, exclusive upper bound).

    Raises:
        ConfigError: one is out of its range.
    """
    if group["adapt"] not in ADAPT:
        listed = ", ".join(f"'{name}'" for name in ADAPT)
        raise ConfigError(f"{owner}: adapt is '{group['adapt']}'; it must be one of {listed}.")
    for name, (least, below) in ranges.items():
        values = group[name] if isinstance(group[name], (list, tuple)) else [group[name]]
        for value in values:
            if not least <= value < below:
                bound = "" if below == float("inf") else f" and below {below:g}"
                raise ConfigError(
                    f"{owner}: {name} is {group[name]}; it must be {least:g} or more{bound}."
                )


def adapts(parameter: Tensor, adapt: str) -> bool:
    """Return whether a parameter gets a rate of its own;
    "matrices" are of two dimensions or more (not biases and norms).
    """
    return adapt == "all" or (adapt == "matrices" and parameter.dim() > 1)


def scale_by_ratio(updates: Sequence[Tensor], above: Tensor, below: Tensor) -> None:
    """Multiply each layer's update by above / below, in place;
    by 1 if either is 0, so a layer of zeros can leave zero.
    """
    ratios = torch.where((above > 0) & (below > 0), above / below, 1.0)
    torch._foreach_mul_([local_of(update) for update in updates], list(ratios.unbind()))


def with_gradient(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the group's parameters that have a gradient, and their gradients.

    Raises:
        ConfigError: a gradient is sparse.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    if any(gradient.is_sparse for gradient in gradients):
        raise ConfigError(
            "LARS and LAMB take no sparse gradients. Use torch.optim.SparseAdam, or"
            " Embedding(sparse=False)."
        )
    return parameters, gradients
