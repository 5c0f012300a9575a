"""Hydra's own node of a config, `hydra`:
it decides what Hydra itself builds and runs, so only the command line may set it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.choices import choices_of, in_force, likely_choices, register
from trainkit.config.of_run import Primary, read_config
from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError

_PARTS = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")  # built by Hydra


def compose(folder: Path, name: str | None, overrides: list[str]) -> DictConfig:
    """Return a composed config with Hydra's own node; `name` None for an empty one."""
    _initialize(folder)
    config = None
    with contextlib.suppress(HydraException, OmegaConfBaseException):
        searched = [folder, *conf_folders(Path.cwd())]
        likely = {} if name is None else likely_choices(name, overrides, searched)
        config = _composed(name, overrides, likely)
        chosen = config.hydra.runtime.choices
        if name and any(likely.get(key) != chosen[key] for key in chosen if "/" not in key):
            config = None
    config = config or _composed(name, overrides, choices_of(name, overrides))
    HydraConfig.instance().set_config(config)
    return config


def _composed(name: str | None, overrides: list[str], choices: Mapping[str, Any]) -> DictConfig:
    with in_force(choices):
        return hydra.compose(name, overrides, return_hydra_config=True)


def _initialize(folder: Path) -> None:
    register()  # again in a process of its own, of joblib for example
    GlobalHydra.instance().clear()
    hydra.initialize_config_dir(str(folder), version_base="1.3")


@contextlib.contextmanager
def of_trial(folder: Path, name: str, more: list[str]) -> Iterator[DictConfig]:
    """Compose the job that Hydra runs now once more; within the context its own node is Hydra's."""
    running: Any = HydraConfig.instance().cfg
    main = GlobalHydra.instance().hydra
    try:
        composed = compose(folder, name, [*more, *running.hydra.overrides.task])
        HydraConfig.instance().cfg = running
        yield composed
    finally:
        HydraConfig.instance().cfg = running
        GlobalHydra.instance().hydra = main


def is_of_hydra(override: str) -> bool:
    """Return whether an override sets Hydra's own node, or selects a config of its groups."""
    return override.lstrip("+~").startswith("hydra")


def plain_hydra(folder: Path, typed: list[str]) -> dict[str, Any]:
    """Return Hydra's own parts as the command line alone sets them, with an empty config."""
    searched = (folder, *conf_folders(Path.cwd()))
    moves = any("$" in word or "searchpath" in word for word in typed)
    if moves or any((at / "hydra").exists() for at in searched):
        return _hydra_parts(compose(folder, None, typed))
    if tuple(typed) not in _plain:
        _plain[tuple(typed)] = _hydra_parts(compose(folder, None, typed))
    _initialize(folder)  # a sweep over glob(*) asks Hydra for the names of a group
    return copy.deepcopy(_plain[tuple(typed)])


# Hydra's own parts by what is typed: with nothing of the user's, they are always the same.
_plain: dict[tuple[str, ...], dict[str, Any]] = {}


def check_hydra(config: DictConfig, primary: Primary, typed: list[str]) -> None:
    """Refuse a config file that changes the objects that Hydra itself builds and runs, or has
    settings of Hydra's without effect here; `config` is the last one that was composed.

    Hydra builds its launcher, sweeper, callbacks and logging from the config, of any class, before
    any check. They must be those of an empty config, except for overrides on the command line.
    """
    parts = _hydra_parts(config)
    running = HydraConfig.instance().cfg
    plain = plain_hydra(primary.folder, typed)
    HydraConfig.instance().cfg = running
    for key, value in parts.items():
        if value != plain[key]:
            nodes = f"hydra/{key}=NAME, or hydra.{key}.KEY=VALUE"
            raise ConfigError(
                f"A config file sets hydra.{key}, which decides what Hydra runs. Give it at the"
                f" command line: {f'hydra.{key}=VALUE' if '.' in key else nodes}."
            )
    _refuse_stand_ins(config, typed)
    _refuse_without_effect(primary)


def _refuse_without_effect(primary: Primary) -> None:
    """Refuse what a config's own file sets of Hydra's, and only trainkit decides."""
    files = [at / f"{primary.name}.yaml" for at in (primary.folder, *conf_folders(Path.cwd()))]
    file = next(filter(Path.is_file, files))
    for key in read_config(file).get("hydra") or ():
        if key not in ("searchpath", "job", *_PARTS):
            raise ConfigError(
                f"{file} sets hydra.{key}, which has no effect: the folder of a run, and of several"
                " with -m, is run_dir=FOLDER. Leave it out."
            )


def _refuse_stand_ins(config: DictConfig, typed: list[str]) -> None:
    """Refuse a file that Hydra finds in place of its own, as conf/hydra/launcher/basic.yaml,
    unless its group was typed.
    """
    groups = [override.lstrip("+").partition("=")[0] for override in typed]
    for group, name in config.hydra.runtime.choices.items():
        if not group.startswith("hydra/") or any(
            group == own or group.startswith(f"{own}/") for own in groups
        ):
            continue
        for path in (folder / group / f"{name}.yaml" for folder in conf_folders(Path.cwd())):
            if path.is_file():
                raise ConfigError(
                    f"{path} would replace Hydra's own {group}={name}, which decides what Hydra"
                    f" runs. Give it another name, and select it at the command line: {group}=NAME."
                )


def _hydra_parts(config: DictConfig) -> dict[str, Any]:
    """Return the parts of Hydra's own config that can run code or change the process, resolved.

    Args:
        config: the last one that was composed, which `${hydra:...}` reads.
    """
    node = config.hydra
    parts = {key: node[key] for key in _PARTS}
    parts |= {f"job.{key}": node.job[key] for key in ("env_set", "env_copy", "chdir")}
    return {
        key: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for key, part in parts.items()
    }


@contextlib.contextmanager
def plain_help() -> Iterator[None]:
    """Let Hydra 1.3 define its options under Python 3.14, whose argparse reads the help of an option
    as soon as it is defined: Hydra gives it an object that only prints as text.
    """
    add = argparse.ArgumentParser.add_argument

    def add_argument(parser: argparse.ArgumentParser, *names: str, **settings: Any) -> Any:
        if settings.get("help") is not None:
            settings["help"] = str(settings["help"])
        return add(parser, *names, **settings)

    argparse.ArgumentParser.add_argument = add_argument  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.add_argument = add  # type: ignore[method-assign]
