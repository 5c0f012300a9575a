"""What a behaviour is written against:
the classes of one of the two trainers, and what both train.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 40, 8


class Framework(NamedTuple):
    """The names of one trainer, by which a user's script imports them.

    Attributes:
        name: "lightning" or "trainkit".
        Module: LightningModule or Task.
        DataModule: LightningDataModule or DataModule.
        Callback: the base of callbacks.
        callbacks: the module of its own callbacks.
        loggers: the module of its loggers.
        root: the package.
        folder: of this run.
    """

    name: str
    Module: Any
    DataModule: Any
    Callback: Any
    callbacks: Any
    loggers: Any
    root: Any
    folder: Path

    def trainer(self, **settings: Any) -> Any:
        """Return a Trainer that shows and writes nothing, unless the settings say so."""
        silent: dict[str, Any] = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "accelerator": "cpu",
        }
        return self.root.Trainer(
            **silent | {"default_root_dir": str(self.folder), "max_epochs": 2} | settings
        )

    def line(self, **members: Any) -> Any:
        """Return a linear model that trains by SGD; `members` replace or add methods."""
        return type("Line", (line_of(self.Module),), members)()


def line_of(base: Any) -> Any:
    """Return the class of a linear model, of a base."""

    class Line(base):  # type: ignore[misc]
        """One weight and one bias."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            """Return one number a sample."""
            answer: Tensor = self.layer(x)
            return answer

        def loss(self, batch: Any) -> Tensor:
            """Return the mean squared error."""
            return (self(batch[0]) - batch[1]).pow(2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            """Return the loss."""
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            """Log the loss."""
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            """Return plain SGD."""
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Line


def data(
    rows: int = ROWS, batch: int = BATCH, kind: Callable[..., Any] = DataLoader, **options: Any
) -> Any:
    """Return a loader of a fixed data set, in its order."""
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 2, generator=numbers)
    return kind(TensorDataset(inputs, inputs.sum(1, keepdim=True) * 3), batch_size=batch, **options)


def weights(task: Any) -> list[float]:
    """Return all weights."""
    return [
        round(float(value), 5)
        for value in torch.cat([p.detach().reshape(-1) for p in task.parameters()])
    ]
