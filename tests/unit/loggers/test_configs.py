"""conf/logger: each file builds its logger, alone and with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.config.compose import run
from trainkit.config.instantiate import build
from trainkit.errors import ConfigError
from trainkit.loggers.base import Logger

NAMES = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "logger").glob("*.yaml"))


def loggers_of(tmp_path: Path, *typed: str) -> list[Logger]:
    """Return the loggers that a command line builds."""
    jobs: list[Any] = []
    run("fit", ["conf=mlp", f"run_dir={tmp_path}", *typed], True, jobs.append)
    trainer = build(jobs[0].config, []).trainer
    assert trainer is not None
    return [callback for callback in trainer.callbacks if isinstance(callback, Logger)]


def test_there_are_as_many_files_as_loggers() -> None:
    """Each logger of the package has a file, and a name at its face."""
    assert NAMES == ["csv", "jsonl", "mlflow", "none", "prometheus", "tensorboard", "wandb"]
    face = [name.removesuffix("Logger").lower() for name in trainkit.__all__ if "Logger" in name]
    assert face == [name for name in NAMES if name != "none"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_a_file_builds_its_logger(tmp_path: Path, name: str) -> None:
    """`logger=[name]` builds only that logger."""
    (logger,) = loggers_of(tmp_path, f"logger=[{name}]")
    assert type(logger).__name__.lower() == f"{name}logger"


def test_several_go_together(tmp_path: Path) -> None:
    """Each logger takes its settings by its own key."""
    typed = [
        "logger=[csv,jsonl,prometheus,tensorboard]",
        "logger.prometheus.port=0",
        "logger.tensorboard.log_graph=true",
    ]
    names = [type(logger).__name__ for logger in loggers_of(tmp_path, *typed)]
    assert names == ["CSVLogger", "JSONLLogger", "PrometheusLogger", "TensorBoardLogger"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("logger.prometheus.port=high", r"logger\.prometheus\.port is 'high'; it must be"),
        ("logger.prometheus.prot=1", r"logger\.prometheus\.prot is not a setting.*port"),
    ],
)
def test_a_wrong_setting_is_named_by_its_key(tmp_path: Path, typed: str, message: str) -> None:
    """It fails before anything is built."""
    with pytest.raises(ConfigError, match=message):
        loggers_of(tmp_path, "logger=[prometheus]", typed)
