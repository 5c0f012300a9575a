"""Selects the engine of a run. Imports no torch before an engine is made."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from trainkit import extension
from trainkit.arguments import show
from trainkit.engine.options import refusals
from trainkit.errors import ConfigError, EngineError, clause
from trainkit.extension import EngineEntry
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.engine.base import Engine

_HOROVOD = (
    "Run `python -m trainkit horovod install`: it builds Horovod for the torch that is installed."
)

ENGINES = {
    "single": EngineEntry("trainkit.engine.single.SingleEngine"),
    "horovod": EngineEntry(
        "trainkit.engine.horovod.engine.HorovodEngine", "horovod", "Horovod", _HOROVOD
    ),
    "ddp": EngineEntry("trainkit.engine.ddp.engine.DDPEngine"),
}


def auto_engine(**options: Any) -> Engine:
    """Make the engine of the launcher: horovodrun -> horovod, torchrun -> ddp, none -> single.

    Args:
        options: of the engine that the launcher implies: see HorovodEngine, DDPEngine,
            SingleEngine. None means not given.

    Raises:
        ConfigError: an option was set that the launcher's engine does not have.
        EngineError: the engine's framework cannot be imported.
    """
    name = read_launcher().engine
    given = {option: value for option, value in options.items() if value is not None}
    for option, why in refusals(name, by_launcher=True).items():
        if option in given:
            raise ConfigError(f"engine.{option} is {show(given[option])}, and {why}")
    return make_engine(name, **given)


def names() -> list[str]:
    """Return the names of all engines: the core's, then those of extensions."""
    return list(dict.fromkeys([*ENGINES, *extension.names("engines")]))


def entry_of(name: str) -> EngineEntry:
    """Return what is known of an engine before it is imported.

    Raises:
        ConfigError: there is no such engine, or two have this name.
    """
    entry: EngineEntry | None = extension.find("engines", name, ENGINES)
    if entry is None:
        known = ", ".join(("auto", *names()))
        raise ConfigError(
            f"engine is '{name}'; it must be one of {known}.{extension.broken_note()}"
        )
    return entry


def target_of(target: str, launched: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the class that a config's `engine` is checked against, and the message for each option
    that it lacks.

    Args:
        target: the config's `engine._target_`; auto_engine stands for the launcher's engine.
        launched: the engine of the ranks that this process is to start, None if it is a rank
            itself.
    """
    if target == f"{__name__}.{auto_engine.__name__}":
        name = launched or read_launcher().engine
        return entry_of(name).target, refusals(name, by_launcher=True)
    known = next((name for name in names() if entry_of(name).target == target), None)
    return target, refusals(known) if known else {}


def make_engine(name: str, **options: Any) -> Engine:
    """Make an engine by name.

    Raises:
        ConfigError: there is no such engine or option.
        EngineError: its framework cannot be imported.
    """
    if name == "auto":
        return auto_engine(**options)
    entry = entry_of(name)
    require(name)
    try:
        engine: Engine = extension.resolve(entry.target)(**options)
    except ImportError as error:
        raise EngineError(
            f"engine={name} cannot be imported: {clause(error)}. {entry.install}".rstrip()
        ) from error
    return engine


def require(name: str) -> None:
    """Raise ConfigError if an engine needs a package that is not installed.
    Costs no import; a user's own needs none.
    """
    entry = extension.find("engines", name, ENGINES)
    if entry is not None and entry.package and importlib.util.find_spec(entry.package) is None:
        why = " (the launcher asks for it)" if read_launcher().engine == name else ""
        raise ConfigError(
            f"engine={name}{why}, but {entry.title or entry.package} is not installed."
            f" {entry.install}".rstrip()
        )
