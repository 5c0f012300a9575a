"""Usage: the arguments of a command, as data (usage.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """A command's arguments.

    Attributes:
        line: the arguments, as typed.
        about: what the command does.
        options: of key=value (or --flag): name, type, default ("": it must be given), meaning.
        examples: arguments, as typed.
        takes_config: whether conf=NAME and overrides may follow.
        takes_run: whether a run's folder is an argument.
    """

    line: str
    about: str
    options: tuple[tuple[str, str, str, str], ...] = ()
    examples: tuple[str, ...] = ()
    takes_config: bool = False
    takes_run: bool = False

    def keys(self) -> dict[str, str]:
        """Return name -> meaning of the key=value options."""
        return {name: text for name, _, _, text in self.options if not name.startswith("-")}
