"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): torch's, on any engine.

A second moment takes the memory of a row and a column of its matrix. `lr` is the largest relative
step: the update is lr (or 1 / sqrt(steps), if that is less) x the root mean square of the weight.
torch.optim.Adafactor fails on weights that ranks hold parts of: here each of them is gathered for
its update, one after the other. As torch's, it waits for the device, three times a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.shards import is_spread, whole_of
from trainkit.extensions.optimizers.spread import spread_as


class Adafactor(torch.optim.Adafactor):
    """Has torch.optim.Adafactor's arguments."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights."""
        if not any(is_spread(p) for group in self.param_groups for p in group["params"]):
            loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            worker = torch.optim.Adafactor([torch.empty(0)])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_whole(worker, group, parameter, parameter.grad)
        return loss

    def _step_whole(
        self,
        worker: torch.optim.Adafactor,
        group: dict[str, Any],
        parameter: Tensor,
        gradient: Tensor,
    ) -> None:
        """Update one weight as `worker` does the whole of it; a collective."""
        whole = nn.Parameter(whole_of(parameter.detach()))
        whole.grad = whole_of(gradient)
        held = {name: whole_of(value) for name, value in self.state[parameter].items()}
        worker.param_groups = [group | {"params": [whole]}]
        worker.state = defaultdict(dict, {whole: held} if held else {})
        worker.step()  # type: ignore[no-untyped-call]
        parameter.copy_(spread_as(whole.detach(), parameter))
        # a checkpoint spreads what has the weight's shape
        self.state[parameter] = {
            name: spread_as(value, parameter) if value.shape == parameter.shape else value
            for name, value in worker.state[whole].items()
        }
