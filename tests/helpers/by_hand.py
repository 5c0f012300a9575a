"""Tasks that update their weights themselves: two optimizers in turn, and every fourth batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.toy import Line


class Pair(Line):
    """Two layers: each batch updates the second one, then the first.

    Args:
        losses: of each batch; None: those of the data.
    """

    def __init__(self, losses: list[float] | None = None) -> None:
        super().__init__(lr=0.01)
        self.second = nn.Linear(3, 1)
        self.losses = losses
        self.seen = 0
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update both."""
        inputs, targets = batch
        first, second = self.optimizers()
        for optimizer, layer in ((second, self.second), (first, self.model)):
            loss = (layer(inputs).squeeze(-1) - targets).square().mean()
            if self.losses is not None:
                loss = loss * 0 + self.losses[self.seen]
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.seen += 1

    def configure_optimizers(self) -> Any:
        """Return one for each layer."""
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.model, self.second)]


class Seldom(Line):
    """Sums the gradients of four batches.

    Args:
        losses: of each batch; None: those of the data.
    """

    def __init__(self, losses: list[float] | None = None) -> None:
        super().__init__(lr=0.01)
        self.losses = losses
        self.seen = 0
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Update in each fourth batch of the run."""
        inputs, targets = batch
        optimizer = self.optimizers()
        loss = (self.model(inputs) - targets).square().mean()
        if self.losses is not None:
            loss = loss * 0 + self.losses[self.seen]
        self.manual_backward(loss)
        self.seen += 1
        if self.seen % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
