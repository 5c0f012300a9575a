"""Options of a command, key=value, mixed with the overrides of a config."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainkit.errors import ConfigError


def split_own(arguments: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options with these names, as text, and the other arguments in order."""
    is_own = [argument.split("=", 1)[0] in names and "=" in argument for argument in arguments]
    own = dict(argument.split("=", 1) for argument, mine in zip(arguments, is_own, strict=True) if mine)
    return own, [argument for argument, mine in zip(arguments, is_own, strict=True) if not mine]


def count(key: str, text: str, least: int = 1) -> int:
    """Return an integer.

    Raises:
        ConfigError: the text is not an integer, or is below `least`.
    """
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{key} is '{text}'; it must be a whole number, {least} or more.")
    return int(text)


def engine_of(overrides: Sequence[str]) -> str:
    """Return the engine that the overrides choose, "auto" by default."""
    return next((o.removeprefix("engine=") for o in overrides if o.startswith("engine=")), "auto")
