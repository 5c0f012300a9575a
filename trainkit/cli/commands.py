"""The commands of `python -m trainkit`:
trainkit's own, each a file of cli/, and those of extensions. Imports none of them.
"""

from __future__ import annotations

from trainkit import extension
from trainkit.cli.usage import USAGES
from trainkit.extension import Command, Usage

COMMANDS = {
    "fit": Command("train", "trainkit.cli.run.main"),
    "validate": Command("evaluate a checkpoint on the validation data", "trainkit.cli.run.main"),
    "test": Command("evaluate a checkpoint on the test data", "trainkit.cli.run.main"),
    "predict": Command("write a checkpoint's predictions", "trainkit.cli.run.main"),
    "extensions": Command(
        "list what is beside the core: what each extension brings, and how far it is proven",
        "trainkit.cli.extensions.main",
    ),
}


def all_commands() -> dict[str, Command]:
    """Return all commands by name: the core's, then those of extensions; without parts of the
    command `data`.

    Raises:
        ConfigError: two bring one of the same name.
    """
    brought = [name for name in extension.names("commands") if " " not in name]
    return COMMANDS | {name: extension.find("commands", name, COMMANDS) for name in brought}


def command_of(name: str) -> Command | None:
    """Return a command; None if there is none of that name. "data pack" is the part `pack` of the
    command `data`.

    Raises:
        ConfigError: two bring it.
    """
    command: Command | None = extension.find("commands", name, COMMANDS)
    return command


def parts_of(name: str) -> list[str]:
    """Return the parts of a command that extensions bring: "pack" of `data pack`."""
    return [
        each.removeprefix(f"{name} ")
        for each in extension.names("commands")
        if each.startswith(f"{name} ")
    ]


def find_usage(name: str) -> Usage | None:
    """Return what a command takes; None if it answers --help itself.

    Raises:
        ConfigError: two bring it.
    """
    if name in USAGES:
        return USAGES[name]
    command = command_of(name)
    usage: Usage | None = (
        extension.resolve(command.usage) if command is not None and command.usage else None
    )
    return usage
