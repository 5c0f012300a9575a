"""runs: a table of the runs below a folder; the same table ends a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.cli.as_json import print_json
from trainkit.cli.guard import main_alone
from trainkit.cli.options import read_keys
from trainkit.cli.usage import help_text
from trainkit.console import console_of, short
from trainkit.errors import ConfigError
from trainkit.extensions.reports.show.best import chosen_goal, goal_by, print_best
from trainkit.extensions.reports.show.files import find_runs
from trainkit.extensions.reports.show.table import facts_of, print_table, sort_runs
from trainkit.extensions.reports.usage import RUNS


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return main_alone(
        arguments, help_text(command, RUNS), lambda: _work(arguments), only_prints=True
    )


def _work(arguments: Sequence[str]) -> None:
    folders = [
        argument
        for argument in arguments
        if argument != "--json" and ("=" not in argument or Path(argument).is_dir())
    ]
    others = [argument for argument in arguments if argument not in (*folders, "--json")]
    given = read_keys(others, RUNS.keys(), "runs")
    if len(folders) > 1:
        raise ConfigError(
            f"There are {len(folders)} folders: {', '.join(folders)}. Give one, that holds the"
            " runs."
        )
    top = Path(folders[0] if folders else "runs").absolute()
    if not top.is_dir():
        raise ConfigError(
            f"There is no folder {short(top)}. Give a folder that holds runs, for example runs/mlp."
        )
    runs = find_runs(top)
    if not runs:
        raise ConfigError(
            f"There are no runs in {short(top)} or below it. Give a folder that holds some, as"
            " runs/mlp."
        )
    goal = chosen_goal(runs, given)
    key = given.get("sort", "")
    name = key.removeprefix("-")
    if key:
        runs = sort_runs(runs, key, goal if goal.metric == name else goal_by(runs, name))
    if "--json" in arguments:
        print_json(facts_of(runs, goal))
        return
    console = console_of()
    print_table(runs, goal, console, needed=[name])
    console.print(f"folder  {short(top)}", soft_wrap=True)
    print_best(runs, goal, console, ["runs", short(top)])
