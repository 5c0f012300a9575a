"""Errors of Hydra and OmegaConf in the words of a config: key, value, what there is, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError, did_you_mean

# hydra/GROUP/NAME -> the package that brings it.
_PLUGINS = {
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
    "hydra/sweeper/ax": "hydra-ax-sweeper",
    "hydra/sweeper/nevergrad": "hydra-nevergrad-sweeper",
    "hydra/launcher/joblib": "hydra-joblib-launcher",
    "hydra/launcher/submitit_local": "hydra-submitit-launcher",
    "hydra/launcher/submitit_slurm": "hydra-submitit-launcher",
    "hydra/launcher/ray": "hydra-ray-launcher",
    "hydra/launcher/ray_aws": "hydra-ray-launcher",
    "hydra/launcher/rq": "hydra-rq-launcher",
}
_OF_EXTRA = ("optuna", "joblib", "submitit")  # trainkit[sweeps] brings these
_TWICE = (
    "{0} is chosen by two defaults lists. A line adds a config; to replace the one that an earlier"
    " list chose, say so, with the group's path from the top: `- override /{0}: {1}`. On the"
    " command line it is {0}={1}, without the +."
)
_RELATIVE = (
    "A config of {0} chooses {1} below its own group, as {0}/{1}. The path of a group at the top"
    " begins with a slash; to replace the config chosen before: `- override /{1}: {2}`."
)
_NOT_CHOSEN = (
    "{0} replaces a choice of {1} (`override`), but no defaults list before it chooses one. Check"
    " the name; if the config really has none, add one without `override`: `- /{1}: NAME`."
)
_NOT_LAST = (
    "In the defaults list of {0}, `override` of {1} stands before '{2}'. Put all lines with"
    " `override` last."
)

_ABSENT_VARS = "{0} is ${{{1}}}, and there is no {1}. Give it: +{1}=..."
_ABSENT = "{0} is ${{{1}}}, and there is no {1}. Choose another {2}=NAME, or set {0} itself."


def options_of(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names of a group's configs."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def explain(error: Exception) -> NoReturn:
    """Reword an error of Hydra's or OmegaConf's."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        _explain_missing_plugin(str(error.missing_cfg_file), error)
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        # hydra/launcher is a group of Hydra's own, launcher one of ours
        is_hydras = group.startswith("hydra/")
        if (
            "/" in group
            and not is_hydras
            and options_of(group.rpartition("/")[2], conf_folders(Path.cwd()))
        ):
            own, _, meant = group.rpartition("/")
            raise ConfigError(_RELATIVE.format(own, meant, name)) from error
        # For a list, as logger=[csv,tensorbord], Hydra does not list the options.
        options = list(error.options or options_of(group, conf_folders(Path.cwd())))
        raise ConfigError(
            f"{group or 'conf'} is '{name}', and there is none.{did_you_mean(name, options)} There"
            f" are {', '.join(options)}."
        ) from error
    _explain_defaults(str(error), error)
    if no_group := re.match(
        r"Could not override '([^']+)'\. No match in the defaults list\.", str(error)
    ):
        group = no_group[1]
        raise ConfigError(
            f"This config chooses no {group}, so there is none to replace: +{group}=NAME adds one."
            f" An argument of the task is passed to it as `{group}: ${{{group}}}`."
        ) from error
    if no_key := re.match(r"Could not override 'vars\.([^']+)'", str(error)):
        _explain_absent(no_key[1], error)
    if isinstance(error, OverrideParseException):
        raise ConfigError(
            f"'{str(error.override).removeprefix('++')}' is no override that Hydra can read. Quote"
            " it: 'key=\"value\"'."
        ) from error
    first = str(error).strip().splitlines()
    text = " ".join(line.strip() for line in first[:3])
    if isinstance(error, ConfigCompositionException) and error.__cause__ is not None:
        text += " " + str(error.__cause__).splitlines()[0]
    key = getattr(error, "full_key", None)
    if isinstance(error, MissingMandatoryValue):
        raise ConfigError(
            f"{key} is missing: this config requires it. Give it: {key}=..."
        ) from error
    if isinstance(error, InterpolationKeyError):
        absent = text.removeprefix("Interpolation key '").partition("'")[0]
        text = _ABSENT_VARS if absent.startswith("vars.") else _ABSENT
        raise ConfigError(text.format(key, absent, absent.partition(".")[0])) from error
    raise ConfigError(f"{key}: {text}" if key and key not in text else text) from error


def _explain_absent(name: str, error: Exception) -> NoReturn:
    """Reword Hydra's error about an entry of `vars` that no file of the config has."""
    node = getattr(error.__cause__, "parent_node", None)
    known = [str(key) for key in node] if isinstance(node, DictConfig) else []
    near = did_you_mean(name.rpartition(".")[2], known)
    raise ConfigError(
        f"vars.{name} is given, and no file of this config gives it a value.{near} To add one:"
        f" +vars.{name}=..."
    ) from error


def _explain_missing_plugin(file: str, error: Exception) -> None:
    package = _PLUGINS.get(file)
    if package is not None:
        group, _, name = file.rpartition("/")
        extra = (
            ", or all of trainkit's: pip install 'trainkit[sweeps]'"
            if any(own in package for own in _OF_EXTRA)
            else ""
        )
        raise ConfigError(
            f"{group}={name} needs a package that is not installed: pip install {package}{extra}."
        ) from error


def _explain_defaults(text: str, error: Exception) -> None:
    """Reword Hydra's errors about `override` in a config's defaults list."""
    text = " ".join(text.split())
    explained = ""
    if match := re.search(
        r"Multiple values for (\S+)\. To override a value use 'override [^:]+: ([^']+)'", text
    ):
        explained = _TWICE.format(*match.groups())
    elif match := re.match(r"(\S+) appears more than once in the final defaults list", text):
        explained = _TWICE.format(match[1], "NAME")
    elif match := re.search(
        r"In '([^']+)/[^/']+': Could not override '\1/([^'@]+)\S*'\. No match", text
    ):
        explained = _RELATIVE.format(*match.groups(), "NAME")
    elif match := re.search(r"In '([^']+)': Could not override '([^'@]+)\S*'\. No match", text):
        explained = _NOT_CHOSEN.format(*match.groups())
    elif match := re.search(
        r"In (\S+): Override '(\S+) ?: [^']+' is defined before '([^']+)'", text
    ):
        explained = _NOT_LAST.format(*match.groups())
    if explained:
        raise ConfigError(explained) from error
