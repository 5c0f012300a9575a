"""doctor: describes this machine and its software, finds faults, and names remedies."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from trainkit.cli.usage import help_text, read_in_part
from trainkit.console import console_of, is_a_terminal
from trainkit.engine.select import ENGINES
from trainkit.errors import ConfigError
from trainkit.extension import BrokenExtension, Finding, broken, extensions, resolve
from trainkit.extensions.doctor import gpus, host, network, software, sums
from trainkit.extensions.doctor.usage import USAGE

_OPTIONS = ("--json", "--no-allreduce")
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "wrong": ("wrong", "bold red")}


@read_in_part()
def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text(command, USAGE))
        return 0
    if unknown := [argument for argument in arguments if argument not in _OPTIONS]:
        print(
            f"Error: {unknown[0]} is not understood.\n{command} takes {', '.join(_OPTIONS)}, or nothing.",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    findings: list[Finding] = []
    console = console_of()
    as_json = "--json" in arguments
    for finding in examine(allreduce="--no-allreduce" not in arguments):
        if not as_json:
            _show(console, finding, is_first=not findings or findings[-1].area != finding.area)
        findings.append(finding)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        _conclude(console, findings)
    return int(any(finding.status == "wrong" for finding in findings))


def examine(allreduce: bool) -> Iterator[Finding]:
    """Run all checks, that of two ranks if `allreduce`;
    yield each finding as soon as it is known.
    """
    torch = software.ask_torch()
    yield from guarded(software.AREA, functools.partial(software.look, torch))
    yield from guarded(gpus.AREA, functools.partial(gpus.look, torch))
    yield from guarded(host.AREA, functools.partial(host.look, torch))
    yield from guarded(network.AREA, functools.partial(network.look, os.environ))
    for each in extensions():
        for check in each.checks:
            yield from guarded(each.name, functools.partial(_call, check))
    yield from (_broken(each) for each in broken())
    if allreduce and torch.torch is not None:
        if importlib.util.find_spec("horovod") is not None:
            yield from guarded(
                sums.AREA, functools.partial(sums.look, "horovodrun", ENGINES["horovod"].install)
            )
        yield from guarded(
            sums.AREA, functools.partial(sums.look, "torchrun", "pip install --upgrade torch")
        )


def guarded(area: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings; if the check raises, yield that as a finding."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(
            area,
            "this check",
            f"{type(error).__name__}: {error}",
            "warning",
            "The check itself failed.",
        )


def _call(check: str) -> Iterator[Finding]:
    yield from resolve(check)()


def _broken(each: BrokenExtension) -> Finding:
    why = f"It is of {each.source}; nothing that it brings can be used."
    return Finding(
        "Extensions",
        each.name,
        each.error,
        "wrong",
        why,
        f"repair or uninstall it: pip uninstall {each.source}",
    )


def _show(console: Console, finding: Finding, is_first: bool) -> None:
    if is_first:
        console.print(Text(f"\n{finding.area}", style="bold"))
    mark, style = _MARKS[finding.status]
    line = Text.assemble("  ", (f"{mark:<9}", style), f"{finding.name:<28}", finding.value)
    console.print(line, soft_wrap=not is_a_terminal(console.file))


def _conclude(console: Console, findings: Sequence[Finding]) -> None:
    console.print()
    troubles = [finding for finding in findings if finding.status != "ok"]
    if not troubles:
        console.print(Text("Nothing is wrong.", style="green"))
        return
    for finding in sorted(troubles, key=lambda f: f.status != "wrong"):
        mark, style = _MARKS[finding.status]
        console.print(
            Text.assemble((f"{mark}: ", style), f"{finding.name} ({finding.value}). {finding.why}"),
            soft_wrap=not is_a_terminal(console.file),
        )
        if finding.remedy:
            console.print(f"    {finding.remedy}", soft_wrap=True, markup=False)
