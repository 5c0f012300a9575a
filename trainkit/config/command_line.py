"""The words of a command line: the config, its overrides, and Hydra's flags.

`conf=NAME` selects conf/NAME.yaml. Every value override but one of `vars` may add a key (`a.b=1` means `++a.b=1`):
the constructors decide which keys exist (schema.py), since they know more than the yaml files and
name the nearest key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import OverrideParseException

from trainkit.config.choices import lines_of
from trainkit.config.explain import options_of
from trainkit.config.resources import conf_folders
from trainkit.config.schema import full_key
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import advice

# Hydra's flags that hold here, those that take no value, and the short ones.
_FLAGS = ("cfg", "package", "info")
_SWITCHES = ("help", "resolve", "multirun")
_SHORT = ("h", "c", "p", "m", "i")
_WITH_VALUE = (*_FLAGS, "c", "p", "i")
_PRINTS = ("cfg", "c", "info", "i")  # and the two that say how
_SHAPES = ("package", "p", "resolve")
_NO_FOLDER = (
    "'{}' is not a flag: configs are the files of conf/ in the current folder, and the shipped"
    " ones. Select one: conf=NAME"
)
_TWO_CONFIGS = (
    "conf is given twice, '{0}' and '{1}'. To join configs write one in conf/ whose first line is"
    " `defaults: [{0}, {1}, _self_]`, or make one of them an experiment: experiment=NAME."
)
_NOTHING_PRINTED = (
    "{0} says how a config is printed, and nothing asks to print it. Add --cfg job, as --cfg job"
    " --package trainer."
)
_NO_NAME = "{0} is {1}, and {0} {2}. A single value is set as {3}{4}"
_LEFT_OUT = "; ~{0} leaves it out, if nothing in the config refers to it as ${{{0}}}"
_NO_DELETION = (
    "{0}={1} takes back a choice; give it alone, {0}, or with the name that was chosen, {0}=NAME."
)
# if another key may be meant
_MEANT = {"lr": "lr.NAME=...; the rate itself is the optimizer's: optimizer.lr=..."}


_EXPERIMENT = "experiment"


def list_confs(folders: Sequence[Path]) -> list[str]:
    """Return the legal names of `conf=`."""
    return sorted(
        {
            path.stem
            for folder in folders
            for path in folder.glob("*.yaml")
            if not path.stem.startswith("_")
        }
    )


def split(arguments: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Return the value of `conf=`, the overrides, and Hydra's flags with their values.

    Raises:
        ConfigError: an argument is none of them.
    """
    conf = None
    overrides = []
    flags = []
    for before, argument, following in zip(
        ["", *arguments], arguments, [*arguments[1:], ""], strict=False
    ):
        if argument.startswith("conf="):
            if conf is not None:
                raise ConfigError(_TWO_CONFIGS.format(conf, argument.removeprefix("conf=")))
            conf = argument.removeprefix("conf=")
        elif argument.startswith("-"):
            name, sign, value = argument.lstrip("-").partition("=")
            if name not in (_FLAGS if sign else (*_FLAGS, *_SWITCHES, *_SHORT)):
                raise ConfigError(_no_flag(argument, name, value if sign else following))
            flags.append(argument)
        elif ("=" in argument or argument.startswith("~")) and argument.lstrip("+~").partition("=")[
            0
        ]:
            overrides.append(_readable(argument))
        elif before.startswith("-") and before.lstrip("-") in _WITH_VALUE:
            flags.append(argument)  # as in `--cfg job`
        elif argument in list_confs(conf_folders(Path.cwd())):
            raise ConfigError(f"'{argument}' is a config; select it with conf={argument}.")
        else:
            confs = list_confs(conf_folders(Path.cwd()))
            near = did_you_mean(argument, confs)
            raise ConfigError(
                f"'{argument}' is not a setting; it must look like key=value, as"
                f" trainer.max_epochs=3.\nConfigs are selected with conf=NAME: {', '.join(confs)}."
                f"{near}"
            )
    names = [flag.partition("=")[0].lstrip("-") for flag in flags if flag.startswith("-")]
    shaping = next((name for name in names if name in _SHAPES), None)
    if shaping is not None and not set(_PRINTS).intersection(names):
        raise ConfigError(_NOTHING_PRINTED.format(shaping))
    return conf, overrides, flags


def _readable(override: str) -> str:
    """Quote a value with "=", as a checkpoint's path, which Hydra would not read."""
    key, _, value = override.partition("=")
    is_plain = re.fullmatch(r"[\w./:@%+=-]+", value) is not None
    return f'{key}="{value}"' if is_plain and "=" in value else override


def _no_flag(argument: str, name: str, value: str) -> str:
    """Return the sentence for argparse's way to give a setting: the one that is meant, if known."""
    if name in ("config-dir", "config-path"):
        return _NO_FOLDER.format(argument)
    if text := advice("flags", name).removeprefix(". "):
        return f"'{argument}' is not a flag. {text}"
    own = name.replace("-", "_")
    key = own if "." in own else full_key(own)
    is_value = value and "=" not in value and not value.startswith("--")
    meant = f": {key}={value if is_value else '...'}" if key else ", as trainer.max_epochs=3"
    return f"'{argument}' is not a flag. A setting is key=value, without dashes{meant}"


def find_conf(conf: str | None, folders: Sequence[Path]) -> str:
    """Return the name of an existing config.

    Raises:
        ConfigError: there is none with this name.
    """
    names = list_confs(folders)
    if conf is None:
        raise ConfigError(
            f"conf is missing. Give conf=NAME; there are {', '.join(names)}. Or name a run:"
            " run_dir=RUN."
        )
    name = conf.removesuffix(".yaml")
    if not any((folder / f"{name}.yaml").is_file() for folder in folders):
        raise ConfigError(
            f"conf is '{conf}', and there is no such config.{did_you_mean(name, names)} There are"
            f" {', '.join(names)}."
        )
    return name


def as_typed(override: str) -> str:
    """Return an override without what trainkit adds for Hydra."""
    return override.removeprefix("++").replace(f"+{_EXPERIMENT}=", f"{_EXPERIMENT}=", 1)


def select_experiment(overrides: Sequence[str], name: str, folders: Sequence[Path]) -> list[str]:
    """Turn `experiment=NAME` into an addition, after all other choices, if config `name` has no
    line for it.

    Raises:
        ConfigError: there are no experiments.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if key == _EXPERIMENT and not any((folder / _EXPERIMENT).is_dir() for folder in folders):
            raise ConfigError(
                f"experiment is '{value}', and there is no folder of them. Write"
                f" conf/experiment/{value}.yaml."
            )
    is_listed = any(group == _EXPERIMENT for group, _, _ in lines_of(name, folders))
    return [
        f"+{text}" if text.startswith(f"{_EXPERIMENT}=") and not is_listed else text
        for text in overrides
    ]


def force(override: str, folders: Sequence[Path]) -> str:
    """Turn `a.b=1` into `++a.b=1`; leave groups (`data=digits`) and explicit forms (`+`, `~`)
    alone.

    Raises:
        ConfigError: the value of a group cannot be the name of a config.
    """
    key, sign, value = override.partition("=")
    group = key.lstrip("+~")
    is_group = (
        "/" in group
        or "@" in group
        or group == "hydra"
        or any((folder / group).is_dir() for folder in folders)
    )
    if is_group and sign and not _are_names(override):
        if key.startswith("~"):
            raise ConfigError(_NO_DELETION.format(key, value))
        no_choice = _LEFT_OUT.format(group) if value == "null" else ""
        options = options_of(group.partition("@")[0], folders)
        names = f"names a config{': ' * bool(options)}{', '.join(options)}"
        raise ConfigError(
            _NO_NAME.format(group, value, names, _MEANT.get(group, f"{group}.NAME=..."), no_choice)
        )
    # of `vars` no constructor knows which there are: Hydra refuses one that no file has
    is_hydras = key.startswith(("hydra", "vars."))
    return override if override[0] in "+~" or is_group or is_hydras else f"++{override}"


def _are_names(override: str) -> bool:
    """Whether Hydra reads the value of a group's override as names of configs;
    also if it cannot read it, and will say so.
    """
    try:
        parsed = OverridesParser.create().parse_overrides([override])[0]
    except OverrideParseException:
        return True
    if parsed.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return True  # of names that exist
    choices = list(parsed.sweep_iterator() if parsed.is_sweep_override() else [parsed.value()])
    if all(choice and isinstance(choice, dict) for choice in choices):
        return True  # settings, which Hydra merges
    if parsed.is_delete():
        return all(choice in (None, "") or isinstance(choice, str) for choice in choices)
    return all(
        isinstance(name, str)
        for choice in choices
        for name in (choice if isinstance(choice, list) else [choice])
    )
