"""status: what a run does now, once, or again and again (--watch)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.live import Live

from trainkit.cli.guard import main_alone
from trainkit.cli.options import read_keys
from trainkit.cli.usage import help_text
from trainkit.console import console_of, visible
from trainkit.errors import ConfigError
from trainkit.extensions.reports.status.status import OVER, Status, check_folder, read_status
from trainkit.extensions.reports.status.text import facts_of, line_of, table_of
from trainkit.extensions.reports.usage import STATUS

_FLAGS = ("--json", "--watch")
_EVERY_S = "5"


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return main_alone(
        arguments or ["--help"],
        help_text(command, STATUS),
        lambda: _work(arguments),
        only_prints=True,
    )


def _work(arguments: Sequence[str]) -> None:
    own_arguments = [word for word in arguments if word not in _FLAGS]
    folders = [
        word
        for word in own_arguments
        if not word.startswith("-") and ("=" not in word or Path(word).is_dir())
    ]
    given = read_keys(
        [word for word in own_arguments if word not in folders], STATUS.keys(), "status"
    )
    if len(folders) != 1:
        raise ConfigError(
            f"status takes one run's folder, and got {len(folders)}: status runs/resnet50/<time>."
        )
    every_s = _seconds(given.get("every_s", _EVERY_S))
    folder = Path(folders[0]).absolute()
    check_folder(folder)
    if "--watch" in arguments:
        _watch(folder, every_s, "--json" in arguments)
    else:
        if "every_s" in given:
            raise ConfigError("every_s is the interval of --watch: add --watch, or leave it out.")
        _show(read_status(folder), "--json" in arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise ConfigError(
            f"every_s is '{text}'; it must be a number of seconds, from 0.1 to 86400."
        )
    return seconds


def _show(status: Status, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts_of(status), indent=1), flush=True)
    else:
        console_of().print(table_of(status))


def _watch(folder: Path, every_s: float, as_json: bool) -> None:
    """Show the status until the run has ended, or Ctrl-C."""
    console = console_of()
    if console.is_terminal and not as_json:
        with Live(console=console, auto_refresh=False) as live:
            while (status := read_status(folder)).state not in OVER:
                live.update(table_of(status), refresh=True)
                time.sleep(every_s)
            live.update(table_of(status), refresh=True)
        return
    while True:
        status = read_status(folder)
        print(json.dumps(facts_of(status)) if as_json else visible(line_of(status)), flush=True)
        if status.state in OVER:
            return
        time.sleep(every_s)
