"""Selects the engine of a run. Imports no torch before an engine is made."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import show
from trainkit.engine.options import refusals
from trainkit.errors import ConfigError, EngineError
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.engine.base import Engine

EngineName = Literal["auto", "single", "horovod", "ddp", "fsdp", "deepspeed"]

_HOMES = {
    "single": ("trainkit.engine.single", "SingleEngine"),
    "horovod": ("trainkit.engine.horovod.engine", "HorovodEngine"),
    "ddp": ("trainkit.engine.ddp.engine", "DDPEngine"),
    "fsdp": ("trainkit.engine.fsdp.engine", "FSDPEngine"),
    "deepspeed": ("trainkit.engine.deepspeed.engine", "DeepSpeedEngine"),
}


def auto_engine(**options: Any) -> Engine:
    """Make the engine of the launcher: horovodrun -> horovod, torchrun -> ddp, none -> single.

    Args:
        options: of the engine that the launcher implies: see HorovodEngine, DDPEngine, SingleEngine. None means not given.

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


def target_of(target: str, launched: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the class that a config's `engine` is checked against, and the message for each option that it lacks.

    Args:
        target: the config's `engine._target_`; auto_engine stands for the launcher's engine.
        launched: the engine of the ranks that this process is to start, None if it is a rank itself.
    """
    if target == f"{__name__}.{auto_engine.__name__}":
        name = launched or read_launcher().engine
        return ".".join(_HOMES[name]), refusals(name, by_launcher=True)
    names = [name for name, home in _HOMES.items() if target == ".".join(home)]
    return target, refusals(names[0]) if names else {}


def make_engine(name: EngineName, **options: Any) -> Engine:
    """Make an engine by name.

    Raises:
        ConfigError: there is no such engine or option.
        EngineError: its framework cannot be imported.
    """
    if name == "auto":
        return auto_engine(**options)
    if name not in _HOMES:
        raise ConfigError(f"engine is '{name}'; it must be one of auto, {', '.join(_HOMES)}.")
    require(name)
    module, cls = _HOMES[name]
    try:
        engine: Engine = getattr(importlib.import_module(module), cls)(**options)
    except ImportError as error:
        raise EngineError(f"engine={name} cannot be imported: {error}. {_CURES.get(name, '')}".rstrip()) from error
    return engine


_CURE = "Run `python -m trainkit horovod install`: it builds Horovod for the torch that is installed."
_DEEPSPEED_CURE = "Install it: DS_BUILD_OPS=0 pip install deepspeed (or 'trainkit[deepspeed]')."
_CURES = {"horovod": _CURE, "deepspeed": _DEEPSPEED_CURE}


def require(name: str) -> None:
    """Raise ConfigError if `name` needs Horovod or DeepSpeed, and it is not installed. Costs no import."""
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"engine=deepspeed, but DeepSpeed is not installed. {_DEEPSPEED_CURE}")
    if name == "horovod" and importlib.util.find_spec("horovod") is None:
        why = " (the launcher asks for it)" if read_launcher().engine == "horovod" else ""
        raise ConfigError(f"engine=horovod{why}, but Horovod is not installed. {_CURE}")
