"""Objects of Lightning that are given to a Trainer: refused, with what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

from tests.helpers.toy import loader, quiet
from trainkit.callbacks import EarlyStopping
from trainkit.errors import ConfigError, TaskError


class Theirs(LightningModule):
    """A module of Lightning."""


class TheirCallback(theirs.Callback):
    """A callback of Lightning."""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"callbacks": [EarlyStopping("val/loss"), theirs.EarlyStopping("val/loss")]},
            r"trainer\.callbacks has Lightning's EarlyStopping\. Use trainkit\.EarlyStopping",
        ),
        (
            {"callbacks": TheirCallback()},
            r"a TheirCallback, whose base is Lightning's Callback\. Make trainkit\.Callback its base",
        ),
        (
            {"callbacks": theirs.GradientAccumulationScheduler({0: 2})},
            r"Lightning's GradientAccumulationScheduler, which .* docs/lightning\.md names what",
        ),
        ({"callbacks": [EarlyStopping]}, r"has the class EarlyStopping; give an object of it"),
        (
            {"logger": CSVLogger("x")},
            r"trainer\.logger is Lightning's CSVLogger\. Use trainkit\.CSV",
        ),
        ({"logger": 3}, r"trainer\.logger is a int; it must be a trainkit\.loggers\.base\.Logger"),
        (
            {"profiler": SimpleProfiler()},
            r"profiler is a SimpleProfiler; it must be one of simple, adv",
        ),
    ],
)
def test_an_object_of_lightning_is_named_with_ours(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Its class, and what to use in its place; so is a class in place of an object."""
    with pytest.raises(ConfigError, match=sentence):
        quiet(tmp_path, **settings)


def test_a_lightning_module_is_named_with_ours(tmp_path: Path) -> None:
    """It has all methods, but not what a fit asks of a Task."""
    with pytest.raises(TaskError, match=r"The task is a Theirs, .* Make trainkit\.Task its base"):
        quiet(tmp_path).fit(Theirs(), loader(8))  # type: ignore[arg-type]
