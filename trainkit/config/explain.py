"""Errors of Hydra and OmegaConf in the words of a config: key, value, what there is, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue

from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError, did_you_mean


def options_of(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names of a group's configs."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def explain(error: Exception) -> NoReturn:
    """Reword an error of Hydra's or OmegaConf's."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        # For a list, as logger=[csv,tensorbord], Hydra does not list the options.
        options = list(error.options or options_of(group, conf_folders(Path.cwd())))
        raise ConfigError(
            f"{group or 'conf'} is '{name}', and there is none.{did_you_mean(name, options)} There are {', '.join(options)}."
        ) from error
    if no_group := re.match(r"Could not override '([^']+)'\. No match in the defaults list\.", str(error)):
        group = no_group[1]
        raise ConfigError(
            f"This config chooses no {group}, so there is none to replace: +{group}=NAME adds one. An argument of "
            f"the task is passed to it as `{group}: ${{{group}}}`."
        ) from error
    if isinstance(error, OverrideParseException):
        raise ConfigError(
            f"'{str(error.override).removeprefix('++')}' is no override that Hydra can read. Quote it: 'key=\"value\"'."
        ) from error
    first = str(error).strip().splitlines()
    text = " ".join(line.strip() for line in first[:3])
    if isinstance(error, ConfigCompositionException) and error.__cause__ is not None:
        text += " " + str(error.__cause__).splitlines()[0]
    key = getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue):
        raise ConfigError(f"{key} is missing: this config requires it. Give it: {key}=...") from error
    raise ConfigError(f"{key}: {text}" if key and key not in text else text) from error
