"""Options of a command, key=value, mixed with the overrides of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.errors import ConfigError, did_you_mean


def with_plain_run(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with each run_dir=FOLDER as plain FOLDER, before all options."""
    mark = "run_dir="
    rest = [word for word in arguments if not word.startswith(mark) or word == mark]
    folders = [word.removeprefix(mark) for word in arguments if word not in rest]
    place = next((i for i, word in enumerate(rest) if "=" in word), len(rest))
    return [*rest[:place], *folders, *rest[place:]]


def count(key: str, text: str, least: int = 1) -> int:
    """Return an integer.

    Raises:
        ConfigError: the text is not an integer, or is below `least`.
    """
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{key} is '{text}'; it must be a whole number, {least} or more.")
    return int(text)


def read_keys(arguments: Sequence[str], keys: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the key=value arguments of a command without a config; `keys` are the legal ones, each
    with its explanation.

    Raises:
        ConfigError: a key is unknown, has no value, or is given twice.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in keys:
            is_run = not equals and "run_dir" in keys and Path(key).is_dir()
            meant = f" Did you mean run_dir={key}?" if is_run else did_you_mean(key, keys)
            legal = ", ".join(keys) or "none"
            raise ConfigError(f"'{key}' is no setting of {command}.{meant} Use {legal}.")
        if not equals or not value:
            raise ConfigError(f"{key} has no value; write {key}=VALUE: {keys[key]}.")
        if key in given:
            raise ConfigError(f"{key} is given twice, as {given[key]} and {value}. Leave one out.")
        given[key] = value
    return given


def trusted_modules(given: Mapping[str, str]) -> list[str]:
    """Return the modules of trust=[a.b,c]; none without it."""
    names = given.get("trust", "").strip("[]").split(",")
    return [name.strip(" '\"") for name in names if name.strip()]


def engine_of(overrides: Sequence[str]) -> str:
    """Return the engine that the overrides choose, "auto" by default."""
    return next((o.removeprefix("engine=") for o in overrides if o.startswith("engine=")), "auto")
