"""show: curves, rates, throughput and checkpoints of one run, or of several, on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.guard import main_alone
from trainkit.cli.options import read_keys
from trainkit.cli.usage import help_text
from trainkit.console import console_of, short
from trainkit.errors import ConfigError
from trainkit.extensions.reports.show.best import chosen_goal, print_best
from trainkit.extensions.reports.show.differences import settings_grid
from trainkit.extensions.reports.show.files import read_runs
from trainkit.extensions.reports.show.page import by_task, runs_grid, write_show_page
from trainkit.extensions.reports.show.table import facts_of
from trainkit.extensions.reports.usage import SHOW


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    argv, as_json = split_json(arguments)
    with facts_printed(as_json) as facts:
        return main_alone(argv or ["--help"], help_text(command, SHOW), lambda: _work(argv, facts))


def _work(arguments: Sequence[str], facts: dict[str, Any]) -> None:
    folders = [
        Path(argument) for argument in arguments if "=" not in argument or Path(argument).is_dir()
    ]
    given = read_keys(
        [argument for argument in arguments if Path(argument) not in folders],
        SHOW.keys(),
        "show",
    )
    if not folders:
        raise ConfigError(
            "There is no run: give its folder, for example show runs/resnet50/<time>."
        )
    runs = by_task(read_runs(folders))
    goal = chosen_goal(runs, given)
    console = console_of()
    grid, left_out = runs_grid(runs).fitted(console.width, (goal.metric or "",))
    console.print(grid.rich())
    if left_out:
        console.print(f"no room for {', '.join(left_out)}", soft_wrap=True)
    if (differ := settings_grid(runs)) is not None:
        console.print(differ.rich())
    print_best(runs, goal, console, ["show", *map(short, folders)])
    default = folders[0] / "reports" / ("show.html" if len(runs) == 1 else "runs.html")
    page = Path(given.get("output", default))
    facts |= {**facts_of(runs, goal), "page": None}
    try:
        write_show_page(page, runs)
    except OSError as error:  # another user's run, a disk that is full
        why = f"{short(page)} cannot be written: {error.strerror}"
        if "output" in given:
            raise ConfigError(f"output: {why}. Give another file.") from error
        console.print(f"page  {why}. Give a file of yours: output=FILE", soft_wrap=True)
        return
    console.print(f"page  {short(page)}", soft_wrap=True)
    facts["page"] = str(page)
