"""What configs of Lightning's loggers say:
their defaults are taken, what has no counterpart is explained.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import loggers as theirs

from trainkit import loggers as ours
from trainkit.errors import ConfigError

SET_BY_EACH = (
    "self",
    "kwargs",
    "save_dir",
    "name",
    "experiment_name",
    "project",
    "experiment",
    "checkpoint_name",
)
ALONE = ("add_file_policy", "synchronous")  # of the upload in Lightning's own threads


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger"])
def test_their_defaults_are_taken(name: str) -> None:
    """A config that spells out Lightning's defaults builds the logger."""
    parameters = inspect.signature(getattr(theirs, name).__init__).parameters.values()
    given = {p.name: p.default for p in parameters if p.name not in (*SET_BY_EACH, *ALONE)}
    getattr(ours, name)(**given)


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_a_folder_is_known_before_a_fit_if_it_is_given(name: str, tmp_path: Path) -> None:
    """`save_dir` and `version` give it, and nothing is made yet; what has the run's own folder in it
    is refused: a text with "None" in it is another folder.
    """
    logger = getattr(ours, name)
    known = logger(str(tmp_path), name="m", version=3)
    assert (known.log_dir, known.version) == (str(tmp_path / "m" / "version_3"), 3)
    assert [*tmp_path.iterdir()] == []
    for unknown in (logger(), logger(str(tmp_path), name="m")):
        for attribute in ("log_dir", "version"):
            with pytest.raises(ConfigError, match=f"{name}.{attribute} has the run's own folder"):
                getattr(unknown, attribute)


@pytest.mark.parametrize(
    ("name", "settings", "advice"),
    [
        ("CSVLogger", {"prefix": "mine"}, "CSVLogger.prefix is 'mine', .* where they are logged"),
        (
            "TensorBoardLogger",
            {"sub_dir": "a"},
            "TensorBoardLogger.sub_dir is 'a', .* part of name",
        ),
        ("WandbLogger", {"id": "abc"}, "WandbLogger.id is 'abc', .* continues its W&B run"),
        (
            "MLFlowLogger",
            {"run_id": "abc"},
            "MLFlowLogger.run_id is 'abc', .* continues its MLflow run",
        ),
    ],
)
def test_others_are_explained(name: str, settings: dict[str, Any], advice: str) -> None:
    """A value that would change something in Lightning, and has no counterpart,
    is refused with what to do.
    """
    with pytest.raises(ConfigError, match=advice):
        getattr(ours, name)(**settings)
