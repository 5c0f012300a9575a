"""The two trainers that are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainkit
import trainkit.callbacks
import trainkit.loggers
from tests.same_names.kit import Framework


def lightning_kit(folder: Path) -> Framework:
    """Return Lightning's names."""
    pl = pytest.importorskip("lightning.pytorch")
    return Framework(
        "lightning",
        pl.LightningModule,
        pl.LightningDataModule,
        pl.Callback,
        pl.callbacks,
        pl.loggers,
        pl,
        folder,
    )


def trainkit_kit(folder: Path) -> Framework:
    """Return trainkit's."""
    names = (
        trainkit.Task,
        trainkit.DataModule,
        trainkit.Callback,
        trainkit.callbacks,
        trainkit.loggers,
        trainkit,
    )
    return Framework("trainkit", *names, folder)
