"""extensions: lists what is beside the core, what each brings, and how far it is proven."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from rich.text import Text

from trainkit.cli.guard import main_alone
from trainkit.cli.usage import usage_of
from trainkit.console import console_of, is_a_terminal, wrapped_for
from trainkit.errors import ConfigError, clause
from trainkit.extension import BrokenExtension, Extension, broken, extensions

_FLAGS = ("--json",)


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return main_alone(arguments, usage_of(command), lambda: _work(arguments), only_prints=True)


def _work(arguments: Sequence[str]) -> None:
    if unknown := [argument for argument in arguments if argument not in _FLAGS]:
        raise ConfigError(
            f"{unknown[0]} is not understood; extensions takes {', '.join(_FLAGS)} or nothing."
        )
    if arguments:
        print(
            json.dumps([*map(_facts, extensions()), *map(dataclasses.asdict, broken())], indent=1)
        )
        return
    console = console_of()
    in_one_piece = not is_a_terminal(console.file)  # there a line breaks between words

    def show(name: str, style: str, text: str) -> None:
        console.print(Text.assemble((name, style), f"  {text}"), soft_wrap=in_one_piece)

    for extension in extensions():
        show(extension.name, "bold", extension.summary)
        for head, text in _rows(extension):
            line = wrapped_for(console.file, f"    {head:<10}{text}", indent=10)
            console.print(line, soft_wrap=True)
    for each in broken():
        show(each.name, "bold red", _refusal(each))


def _facts(extension: Extension) -> dict[str, object]:
    facts = {name: getattr(extension, name) for name in ("name", "source", "summary", "proven")}
    return facts | {
        name: list(getattr(extension, name))
        for name in ("commands", "engines", "targets", "checks")
    }


def _rows(extension: Extension) -> Iterator[tuple[str, str]]:
    yield "from", extension.source
    yield "proven", extension.proven
    for head in ("commands", "engines", "targets"):
        if brought := getattr(extension, head):
            yield head, ", ".join(brought)
    if extension.checks:
        yield "doctor", f"{len(extension.checks)} of its checks"
    if extension.conf:
        yield "conf", f"the groups in {extension.conf}"


def _refusal(extension: BrokenExtension) -> str:
    return f"cannot be used: {clause(extension.error)}. Repair or uninstall {extension.source}."
