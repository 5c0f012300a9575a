"""From a checked config to live objects. The code below this file sees no config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.lightning_names import of_another_class
from trainkit.api.task import Task
from trainkit.config.allowlist import locate
from trainkit.config.recorded import RecordedConfig
from trainkit.config.schema import SAMPLE_KEYS, samples_of, with_accelerator
from trainkit.data.seeding import seed_process
from trainkit.errors import ConfigError, TrainkitError
from trainkit.loggers.base import Logger
from trainkit.safety.masking import masked
from trainkit.trainer import Trainer


@dataclass(frozen=True)
class Built:
    """The objects of a command."""

    trainer: Trainer
    task: Task
    datamodule: DataModule | None


class Factory:
    """A `_partial_` object: a function that takes further arguments.
    Its errors name the config's key.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any], key: str) -> None:
        self.function = function
        self.arguments = arguments
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.function, args, {**self.arguments, **kwargs}, self.key)


def build(
    config: dict[str, Any], callbacks: Sequence[Callback], recorded: RecordedConfig | None = None
) -> Built:
    """Build trainer, task and data from a config that schema.check has passed; `callbacks` come
    before those of the config.

    Checkpoints and loggers receive `kept`.

    Raises:
        ConfigError: a constructor refuses its arguments.
    """
    config, trusted = with_accelerator(config), config.get("trust") or []
    # the same weights on all ranks even before rank 0's are broadcast
    seed_process(config["seed"])
    engine = instantiate(config["engine"], "engine", trusted) if config.get("engine") else "auto"
    communication = (
        instantiate(config["communication"], "communication", trusted)
        if config.get("communication")
        else "exact"
    )
    several = {
        group: [
            instantiate(node, f"{group}.{name}", trusted)
            for name, node in (config.get(group) or {}).items()
        ]
        for group in ("callbacks", "logger")
    }
    _all_are(several["callbacks"], Callback, "callbacks has", "Callback")
    _all_are(several["logger"], Logger, "logger has", "loggers.Logger")
    trainer = Trainer(
        **(config["trainer"] | samples_of(config)),
        engine=engine,
        communication=communication,
        callbacks=[*callbacks, *several["callbacks"]],
        logger=several["logger"],
        run_dir=config["run_dir"],
        seed=config["seed"],
    )
    recorded = recorded or RecordedConfig(masked(config))
    trainer.options = replace(
        trainer.options, config=recorded.config, masked_values=recorded.values
    )
    data = data_of(config)
    return Built(trainer, instantiate(config["task"], "task", trusted), data)


def data_of(config: dict[str, Any]) -> DataModule | None:
    """Return the DataModule of a config, or None if it has no data.

    Raises:
        ConfigError: its constructor refuses its arguments, or it makes something else.
    """
    if not config.get("data"):
        return None
    node = {key: value for key, value in config["data"].items() if key not in SAMPLE_KEYS}
    data = instantiate(node, "data", config.get("trust") or [])
    _all_are([data], DataModule, "data has", "DataModule")
    return data  # type: ignore[no-any-return]


def instantiate(value: Any, key: str, trusted: Sequence[str]) -> Any:
    """Return the value with each `{_target_: ...}` in it called, the inner ones first.

    Raises:
        ConfigError: a target is not allowed, or refuses its arguments.
    """
    if isinstance(value, list):
        return [instantiate(item, f"{key}.{i}", trusted) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    arguments = {
        name: instantiate(item, f"{key}.{name}", trusted)
        for name, item in value.items()
        if name not in ("_target_", "_partial_")
    }
    if "_target_" not in value:
        return arguments
    function = locate(value["_target_"], f"{key}._target_", trusted)
    return (
        Factory(function, arguments, key)
        if value.get("_partial_")
        else _call(function, (), arguments, key)
    )


def _call(
    function: Callable[..., Any], args: Sequence[Any], arguments: dict[str, Any], key: str
) -> Any:
    try:
        return function(*args, **arguments)
    except TrainkitError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {function.__qualname__} refuses its arguments: {error}"
        ) from error


def _all_are(objects: Sequence[Any], kind: type, place: str, name: str) -> None:
    for item in objects:
        if not isinstance(item, kind):
            raise ConfigError(of_another_class(place, item, name))
