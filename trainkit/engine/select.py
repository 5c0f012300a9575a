"""Which engine a run gets. Imports no torch before an engine is made."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import PositiveFloat
from trainkit.engine.launcher import read_launcher
from trainkit.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from trainkit.engine.base import Engine

EngineName = Literal["auto", "single", "horovod", "ddp"]

_HOMES = {
    "single": ("trainkit.engine.single", "SingleEngine"),
    "horovod": ("trainkit.engine.horovod", "HorovodEngine"),
    "ddp": ("trainkit.engine.ddp", "DDPEngine"),
}


def auto_engine(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    optimizer_wrapper: Literal["trainkit", "horovod"] | None = None,
    cycle_time_ms: PositiveFloat | None = None,
    bucket_cap_mb: PositiveFloat | None = None,
) -> Engine:
    """Make the engine of the launcher: horovodrun -> horovod, torchrun -> ddp, none -> single.

    Args:
        device: see the engines.
        optimizer_wrapper: see HorovodEngine; only with it.
        cycle_time_ms: see HorovodEngine; only with it.
        bucket_cap_mb: see DDPEngine; only with it.

    Raises:
        ConfigError: an option was set that the launcher's engine does not have.
        EngineError: the engine's framework cannot be imported.
    """
    name = read_launcher().engine
    options: dict[str, Any] = {"device": device}
    given = {
        "optimizer_wrapper": (optimizer_wrapper, "horovod"),
        "cycle_time_ms": (cycle_time_ms, "horovod"),
        "bucket_cap_mb": (bucket_cap_mb, "ddp"),
    }
    for option, (value, owner) in given.items():
        if value is None:
            continue
        if owner != name:
            raise ConfigError(
                f"engine.{option} is {value}, but this launcher's engine is '{name}', where it has no effect. It "
                f"belongs to '{owner}'; leave it out here."
            )
        options[option] = value
    return make_engine(name, **options)


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
        raise EngineError(f"engine={name} cannot be imported: {error}. {_CURE}") from error
    return engine


_CURE = "Run `python -m trainkit horovod install`: it builds Horovod for the torch that is installed."


def require(name: str) -> None:
    """Raise ConfigError where `name` needs Horovod and there is none. Costs no import."""
    if name == "horovod" and importlib.util.find_spec("horovod") is None:
        why = " (the launcher asks for it)" if read_launcher().engine == "horovod" else ""
        raise ConfigError(f"engine=horovod{why}, but Horovod is not installed. {_CURE}")
