"""LARS: SGD with momentum and a rate for each layer (You, Gitman and Ginsburg 2017,
arXiv:1708.03888, algorithm 1).

    ratio = trust_coefficient x |w| / (|g| + weight_decay x |w|)                        for each layer
    u     = momentum x u + ratio x (g + weight_decay x w)
    w     = w - lr x u

The paper has v = momentum x v + lr x ratio x (g + weight_decay x w). That is the same for a
constant rate; if the rate changes, ours follows torch's SGD, and
trainer.lr_momentum_correction=false gives the paper's (optim/schedule.py). Biases and norms take
the group's own rate, as in the record runs; the paper gives every layer its ratio (adapt="all").
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.device.shards import norms_of
from trainkit.extensions.optimizers.trust_ratio import (
    LayerwiseOptimizer,
    adapts,
    check_group,
    scale_by_ratio,
)

_INF = float("inf")


class LARS(LayerwiseOptimizer):
    """For large batches of images. Use it with `lr=polynomial` (power 2) and a warm-up.

    Args:
        params: parameters or groups; every option can be set in a group.
        lr: the rate; it is multiplied by the ratio, so it is far larger than SGD's.
        momentum: the share of the last update.
        weight_decay: see above.
        trust_coefficient: the paper's eta.
        adapt: which parameters get a ratio: "matrices" (two dimensions or more; the others take
            `lr` as it is), "all", or "none" (SGD).

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt: Literal["matrices", "all", "none"] = "matrices",
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            params, defaults | {"trust_coefficient": trust_coefficient, "adapt": adapt}
        )
        for group in self.param_groups:
            ranges = {
                "lr": (0.0, _INF),
                "momentum": (0.0, 1.0),
                "weight_decay": (0.0, _INF),
                "trust_coefficient": (0.0, _INF),
            }
            check_group("LARS", group, ranges)

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        updates = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        chosen = [i for i, parameter in enumerate(parameters) if adapts(parameter, group["adapt"])]
        if chosen:
            weight_norms = norms_of([parameters[i] for i in chosen])
            below = norms_of([gradients[i] for i in chosen]) + group["weight_decay"] * weight_norms
            scale_by_ratio(
                [updates[i] for i in chosen], group["trust_coefficient"] * weight_norms, below
            )
        if group["momentum"]:
            for parameter in parameters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
