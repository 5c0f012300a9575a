"""Parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Return two groups: weights of matrices and convolutions decay, biases and norms do not (He et al. 2019, section 3.1).

    Args:
        model: whose parameters are grouped; those of one dimension or none do not decay. Frozen ones are grouped too: they
            may be thawed, and an optimizer leaves alone what has no gradient.
        weight_decay: for the first group; None leaves the optimizer's own.

    Returns:
        Groups for a torch optimizer, the empty ones left out.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    first: dict[str, Any] = {"params": decayed}
    if weight_decay is not None:
        first["weight_decay"] = weight_decay
    return [group for group in (first, {"params": plain, "weight_decay": 0.0}) if group["params"]]
