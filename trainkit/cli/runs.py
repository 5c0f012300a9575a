"""runs: a table of the runs below a folder; the same table ends a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.guard import main_alone
from trainkit.cli.options import read_keys
from trainkit.cli.usage import USAGES, usage_of
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError
from trainkit.report.show.files import FinishedRun, find_runs, read_any
from trainkit.report.show.table import (
    Goal,
    command_of,
    facts_of,
    goal_of,
    number,
    print_table,
    sort_runs,
    tasks_of,
)

if TYPE_CHECKING:
    from trainkit.config.sweep import Sweep


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return main_alone(arguments, usage_of(command), lambda: _work(arguments))


def show_sweep(sweep: Sweep) -> None:
    """Print the table of a sweep's runs, the best one, and the command that repeats it."""
    runs = [read_any(trial.run_dir, str(trial.number)) for trial in sweep.trials()]
    if runs:
        _print(runs, Goal(sweep.metric, sweep.mode), sweep.folder)


def _work(arguments: Sequence[str]) -> None:
    folders = [
        argument
        for argument in arguments
        if argument != "--json" and ("=" not in argument or Path(argument).is_dir())
    ]
    others = [argument for argument in arguments if argument not in (*folders, "--json")]
    given = read_keys(others, USAGES["runs"].keys(), "runs")
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
    key = given.get("sort")
    goal = goal_of(
        runs,
        (
            key.removeprefix("-")
            if key and any(key.removeprefix("-") in run.series for run in runs)
            else None
        ),
    )
    if key:
        runs = sort_runs(runs, key, goal)
    if "--json" in arguments:
        print(json.dumps(facts_of(runs, goal), indent=1))
    else:
        _print(runs, goal, top)


def _print(runs: Sequence[FinishedRun], goal: Goal, folder: Path) -> None:
    console = console_of()
    print_table(runs, goal, console)
    console.print(f"folder  {short(folder)}", soft_wrap=True)
    if goal.mode and len(tasks := tasks_of(goal.compared(runs))) > 1:
        text = (
            f"none of {plural(len(tasks), 'task')} ({', '.join(tasks)}): {goal.metric} is not"
            " comparable. "
        )
        console.print(f"best    {text}Give a folder with runs of one task.", soft_wrap=True)
    if (best := goal.best_run(runs)) is None:
        return
    console.print(
        f"best    run {best.name}: {goal.metric} = {number(goal.last(best))} (of"
        f" {plural(len(runs), 'run')})",
        soft_wrap=True,
    )
    if (command := command_of(best)) is not None:
        print(f"repeat  {command}", flush=True)  # in one piece, and no markup
