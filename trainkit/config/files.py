"""Faults of config files that Hydra reads itself: the file, the line and the column."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]

from trainkit.config.yaml_file import unreadable
from trainkit.errors import ConfigError


def explain_file(error: MarkedYAMLError | RecursionError, name: str) -> NoReturn:
    """Raise the error of a broken file."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        raise ConfigError(
            unreadable(Path(str(error.problem_mark.name).strip("'\" ")), error)
        ) from None
    if isinstance(error, RecursionError) and not any(
        "omegaconf" in line or "hydra" in line for line in _frames(error)
    ):
        raise error
    raise ConfigError(
        f"{name}.yaml, or a config in its defaults list, includes itself. Take it out of that list."
    ) from None


def _frames(error: BaseException) -> list[str]:
    files = []
    trace = error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files[-50:]
