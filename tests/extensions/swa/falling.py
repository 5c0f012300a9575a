"""The task whose averages the tests of this folder compare."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.toy import Net


class Falling(Net):
    """Momentum, dropout and batch norm under a rate that falls each step."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        """Return SGD with a falling rate."""
        optimizer = super().configure_optimizers()
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            }
        ]
