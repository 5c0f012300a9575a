"""The options of a command that takes a config or a script beside its own, and where it may run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainkit.errors import ConfigError
from trainkit.launch.environment import Launcher


def split_own(arguments: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options with these names, as text, and the other arguments in order."""
    own: dict[str, str] = {}
    rest: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in names:
            own[name] = value
        else:
            rest.append(argument)
    return own, rest


def refuse_launcher(command: str, started: Launcher, instead: str) -> None:
    """Refuse a command that starts its ranks itself, and runs under a launcher."""
    if started.world_size > 1:
        raise ConfigError(
            f"{command} starts its ranks itself: run it without {started.name}, with {instead}."
        )
