"""LAMB: Adam with decoupled weight decay and a rate for each layer (You et al. 2020,
arXiv:1904.00962, algorithm 2).

    m = beta1 x m + (1 - beta1) x g              m' = m / (1 - beta1^t)
    v = beta2 x v + (1 - beta2) x g^2            v' = v / (1 - beta2^t)
    r = m' / (sqrt(v') + eps) + weight_decay x w
    w = w - lr x |w| / |r| x r                                                          for each layer

The paper's phi is the identity, as in its experiments. Biases and norms take the group's own rate
(the paper gives every layer its ratio: adapt="all"). Gradients are not clipped here, as NVIDIA's
do: trainer.gradient_clip_val does.
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


class LAMB(LayerwiseOptimizer):
    """For large batches of text.

    Args:
        params: parameters or groups; every option can be set in a group.
        lr: the rate.
        betas: the decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: see above.
        adapt: which parameters get a ratio: "matrices" (two dimensions or more; the others take
            `lr` as it is), "all", or "none" (AdamW, except that its decay is not applied first).

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: Literal["matrices", "all", "none"] = "matrices",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt": adapt,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            ranges = {
                "lr": (0.0, _INF),
                "betas": (0.0, 1.0),
                "eps": (0.0, _INF),
                "weight_decay": (0.0, _INF),
            }
            check_group("LAMB", group, ranges)

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        updates = self._adam(parameters, gradients, group)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        chosen = [i for i, parameter in enumerate(parameters) if adapts(parameter, group["adapt"])]
        if chosen:
            weight_norms = norms_of([parameters[i] for i in chosen])
            own = [updates[i] for i in chosen]
            scale_by_ratio(own, weight_norms, norms_of(own))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _adam(
        self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        """Return m' / (sqrt(v') + eps) of each parameter, after this gradient;
        the steps are counted on the host.
        """
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(
                    step=0,
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
            state["step"] += 1
        states = [self.state[parameter] for parameter in parameters]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [(1 - beta2 ** state["step"]) ** 0.5 for state in states])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(first, [1 - beta1 ** state["step"] for state in states])
        torch._foreach_div_(updates, roots)
        return list(updates)
