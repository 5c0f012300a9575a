"""The launcher of a config: whether this process starts ranks with it, and which jobs it cannot
start.

Its class is imported and asked (launch/job_launcher.py), where this process is to start ranks; none
is known by its name here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.config.allowlist import locate
from trainkit.config.roles import declared_engine, roles_of
from trainkit.errors import ConfigError
from trainkit.launch.environment import is_launched_rank, read_launcher
from trainkit.launch.job_launcher import FitConfig, JobLauncher


def starts_ranks(config: Mapping[str, Any]) -> bool:
    """Return whether this process is to start the ranks of a job, with the config's launcher."""
    return (
        bool(config.get("launcher")) and read_launcher().name == "none" and not is_launched_rank()
    )


def launcher_of(config: Mapping[str, Any]) -> type[JobLauncher]:
    """Return the class of the launcher of a config that has one. Its name must have passed the
    check of names.

    Raises:
        ConfigError: it is not a launcher.
    """
    target = config["launcher"]["_target_"]
    launcher = locate(target, "launcher._target_", config.get("trust") or [])
    if not inspect.isclass(launcher) or not issubclass(launcher, JobLauncher):
        raise ConfigError(
            f"launcher._target_ is '{target}', which cannot start ranks; it must be a class that"
            f" derives from {JobLauncher.__module__}.{JobLauncher.__name__}, as docs/launchers.md"
            " shows."
        )
    return launcher


def engine_started_by(config: Mapping[str, Any]) -> str:
    """Return the engine that engine=auto has on the ranks of a config's launcher."""
    return launcher_of(config).engine_of(_fit(config).settings)


def runs_elsewhere(config: Mapping[str, Any]) -> bool:
    """Return whether the run's folder is one of machines that a config's launcher asks for,
    and not of this one.
    """
    return starts_ranks(config) and launcher_of(config).runs_elsewhere


def check_launcher(config: Mapping[str, Any], command: str) -> None:
    """Refuse a launcher that cannot start this command; a rank that it started takes no notice of
    it.

    Raises:
        ConfigError: it cannot.
    """
    if not config.get("launcher") or is_launched_rank():
        return
    name, launcher = read_launcher().name, launcher_of(config)
    own = launcher.name
    if command != "fit":
        raise ConfigError(
            f"launcher is {own}, which is for fit; {command} runs in this process. Leave it out:"
            " launcher=none."
        )
    if name != "none":
        raise ConfigError(
            f"launcher is {own}, and this process was started by {name}: two launchers. Start it"
            f" without {name}, or without launcher={own}."
        )
    if (why := launcher.refuses(_fit(config))) is not None:
        raise ConfigError(why)


def refuse_several(config: Mapping[str, Any]) -> None:
    """Refuse a job of several (-m) that this process would start with the config's launcher.

    Raises:
        ConfigError: it is one.
    """
    if starts_ranks(config):
        launcher = launcher_of(config)
        raise ConfigError(
            f"-m runs several jobs in this process, and launcher={launcher.name} {launcher.several}"
        )


def launch(config: Mapping[str, Any], arguments: Sequence[str]) -> int:
    """Start a command with the config's launcher; return the exit code.

    Args:
        arguments: the command and what follows it, as they were typed.

    Raises:
        ConfigError: a setting of the launcher is not legal.
    """
    fit = _fit(config)
    return launcher_of(config)(**fit.settings).launch(
        fit, [each for each in arguments if not each.startswith("run_dir=")]
    )


def _fit(config: Mapping[str, Any]) -> FitConfig:
    return FitConfig(config, declared_engine(config), roles_of(config))
