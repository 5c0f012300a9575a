"""data: the command of several parts, each of an extension: data check, data tokens, data pack."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.cli.commands import command_of, find_usage, parts_of
from trainkit.cli.guard import fail
from trainkit.cli.usage import help_text, read_in_part
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import resolve
from trainkit.extensions.data.usage import USAGE
from trainkit.launch.environment import read_launcher


def _help(command: str) -> str:
    """Return the help of the command and of each of its parts."""
    parts = {f"{command} {part}": find_usage(f"{command} {part}") for part in parts_of(command)}
    return "\n".join(
        (
            help_text(command, USAGE),
            *(help_text(name, usage) for name, usage in parts.items() if usage is not None),
        )
    )


def main(command: str, arguments: Sequence[str]) -> int:
    """Run a part of the command; return the exit code."""
    launcher = read_launcher()
    if not launcher.is_main:
        return 0
    part = arguments[0] if arguments else "--help"
    if part in ("-h", "--help"):
        with read_in_part():
            print(_help(command))
        return 0 if arguments else 2
    brought = command_of(f"{command} {part}")
    if brought is None:
        parts = parts_of(command)
        error = ConfigError(
            f"'{command} {part}' is not a command.{did_you_mean(part, parts)} Use"
            f" {', '.join(parts)}; see python -m trainkit {command} --help"
        )
        return fail(error, launcher, str(error), error.exit_code)
    code: int = resolve(brought.main)(f"{command} {part}", arguments[1:])
    return code
