"""A table of runs: the settings that differ, last and best values, state (best.py: which is best)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich.console import Console

from trainkit.console import wrapped_for
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.show.best import best_of, command_of, number, of_a_search
from trainkit.extensions.reports.show.files import FinishedRun, main_values
from trainkit.run.goal import Goal

_NOT_COMPARED = ("run_dir", "optimized_metric")
_MOST_SETTINGS = 8
_MOST_VALUES = 4
_LONGEST_ERROR = 160
_MOST_ERRORS = 5
_BETTER: dict[str, Callable[[Iterable[float]], float]] = {"min": min, "max": max}


def differing(
    runs: Sequence[FinishedRun], searched: Collection[str] | None = None
) -> dict[str, list[str]]:
    """Return the typed settings that differ: key -> a text for each run.

    Args:
        runs: to compare.
        searched: the keys of a search, of which a trial that never started has none, and a resumed
            one more; None: all.
    """
    typed = dict.fromkeys(key for run in runs for key in _compared(run))
    keys = [key for key in typed if searched is None or key in searched]
    shown = {key: [_setting(run, key) for run in runs] for key in keys}
    return {key: texts for key, texts in shown.items() if len(set(texts)) > 1}


def _compared(run: FinishedRun) -> list[str]:
    """Return the typed settings, of a trial without those that its search adds."""
    return [key for key in run.overrides if key not in (*_NOT_COMPARED, *of_a_search(run))]


def table_of(
    runs: Sequence[FinishedRun], goal: Goal, searched: Collection[str] | None = None
) -> Grid:
    """Return a row for each run; `searched` as for `differing`."""
    settings = dict(list(differing(runs, searched).items())[:_MOST_SETTINGS])
    known = dict.fromkeys(name for run in runs for name in run.metrics)
    names = main_values(known, "val")
    names = list(dict.fromkeys([*([goal.metric] if goal.metric in known else []), *names]))[
        :_MOST_VALUES
    ]
    best = [f"best {goal.metric}"] * (goal.mode is not None and goal.metric in known)
    top = best_of(runs, goal)
    rows = [
        (
            f"{run.name} *" if run is top else run.name,
            *(texts[i] for texts in settings.values()),
            *(number(run.last(name)) for name in names),
            *(number(_finite(run, str(goal.metric), _BETTER[str(goal.mode)])) for _ in best),
            str(run.epochs),
            run.state.name,
        )
        for i, run in enumerate(runs)
    ]
    columns = ("run", *settings, *names, *best, "epochs", "state")
    return Grid("", columns, rows, (len(columns) - 1,))


def print_table(
    runs: Sequence[FinishedRun],
    goal: Goal,
    console: Console,
    searched: Collection[str] | None = None,
    needed: Collection[str] = (),
) -> None:
    """Print the table as wide as the console is, failed runs last; below it what it leaves out, and
    the first errors.

    Args:
        runs: a row each.
        goal: what they are compared by.
        console: to print on.
        searched: as for `differing`.
        needed: columns that stay, beside state and metric.
    """
    ordered = sorted(runs, key=lambda run: run.state.name == "failed")
    grid, left_out = table_of(ordered, goal, searched).fitted(
        console.width, ("state", goal.metric or "", *needed)
    )
    console.print(grid.rich())
    failed = [run for run in ordered if run.state.error]
    lines = [f"error   run {run.name}: {_first_line(run.state.error)}" for run in failed]
    if len(failed) > _MOST_ERRORS:
        lines[_MOST_ERRORS:] = [
            f"error   {len(failed) - _MOST_ERRORS} more; runs --json prints all"
        ]
    if left_out:
        lines.insert(0, f"no room for {', '.join(left_out)}")
    for line in lines:
        console.print(wrapped_for(console.file, line, indent=8), soft_wrap=True)


def _finite(
    run: FinishedRun, metric: str, chosen: Callable[[Iterable[float]], float]
) -> float | None:
    """Return the smallest or the largest finite value of a metric."""
    return chosen(run.series[metric][1]) if metric in run.series else None


def facts_of(runs: Sequence[FinishedRun], goal: Goal) -> dict[str, Any]:
    """Return what the table shows, and more, as plain values."""
    settings = differing(runs)
    top = best_of(runs, goal)
    return {
        "runs": [
            {
                "run": run.name,
                "folder": str(run.folder),
                "state": run.state.name,
                "error": run.state.error,
                "epochs": run.epochs,
                "steps": run.steps,
                "settings": {
                    key: run.overrides.get(key, run.settings.get(key)) for key in settings
                },
                "metrics": {
                    name: {"last": run.last(name), "min": _finite(run, name, min)}
                    | {"max": _finite(run, name, max)}
                    for name in run.metrics
                },
            }
            for run in runs
        ],
        "metric": goal.metric,
        "mode": goal.mode,
        "best": top.name if top else None,
        "command": command_of(top) if top else None,
    }


def sort_runs(runs: Sequence[FinishedRun], key: str, goal: Goal) -> list[FinishedRun]:
    """Return the runs sorted by a metric's last value, by a setting, or by "state"; those without
    it last.

    Args:
        runs: to sort.
        key: the name; best first if a callback monitors it, else small ones first. "-NAME" is large
            ones first.
        goal: what a callback monitors.

    Raises:
        ConfigError: no run has it.
    """
    name = key.removeprefix("-")
    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    settings = dict.fromkeys(setting for run in runs for setting in (*run.overrides, *run.settings))
    if name not in (*metrics, *settings, "state"):
        raise ConfigError(
            f"sort is '{key}', which is no metric or setting of these"
            f" runs.{did_you_mean(name, [*metrics, *settings])} They logged"
            f" {', '.join(metrics) or 'nothing'}."
        )
    is_reversed = key.startswith("-") or (goal.metric == name and goal.mode == "max")

    def place(run: FinishedRun) -> tuple[bool, float, str]:
        value: Any = (
            run.last(name)
            if name in metrics
            else run.state.name
            if name == "state"
            else _setting(run, name)
        )
        try:
            size = float(value if value is not None else math.nan)
            text = ""
        except ValueError:
            size = 0.0
            text = str(value)
        is_missing = value in (None, "-") or math.isnan(size)
        return is_missing != is_reversed, 0.0 if is_missing else size, text

    return sorted(runs, key=place, reverse=is_reversed)


def _setting(run: FinishedRun, key: str) -> str:
    """Return a setting as text, a typed float without the digits that a sweeper draws."""
    text = str(run.overrides.get(key, run.settings.get(key, "-")))
    try:
        return f"{float(text):.6g}" if len(text) > 8 and not text.isdecimal() else text
    except ValueError:
        return text


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 3]}..."
