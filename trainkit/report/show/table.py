"""A table of runs: the settings that differ, last and best values, state;
and the best run with the command that repeats it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from trainkit.errors import ConfigError, did_you_mean
from trainkit.report.grid import Grid
from trainkit.report.show.files import FinishedRun

_NOT_COMPARED = ("run_dir", "optimized_metric")
_TRIAL = "callbacks.tune"
_OF_A_TRIAL = (_TRIAL, "callbacks.elastic._target_")  # a search's own, under Ray's driver
_STARTS = {
    "horovodrun": "horovodrun -np {} python",
    "launch": "python -m trainkit launch -np {} -- python",
    "mpirun": "mpirun -np {} python",
    "torchrun": "torchrun --nproc-per-node {}",
}
_MOST_SETTINGS = 8
_MOST_VALUES = 4
_LONGEST_ERROR = 160
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: a metric, and whether "min" or "max" of it is best;
    None where unknown.
    """

    metric: str | None = None
    mode: str | None = None

    def best_value(self, run: FinishedRun) -> float | None:
        """Return the best value of the metric in a run."""
        if self.metric is None or self.mode is None or self.metric not in run.series:
            return None
        return (min if self.mode == "min" else max)(run.series[self.metric][1])

    def best_run(self, runs: Sequence[FinishedRun]) -> FinishedRun | None:
        """Return the run with the best last value, which is also what a sweeper receives;
        None if it is unknown.
        """
        ended = self.compared(runs)
        if self.mode is None or not ended or len(tasks_of(ended)) > 1:
            return None
        return min(
            ended, key=lambda run: (self.last(run) or 0.0) * (1 if self.mode == "min" else -1)
        )

    def compared(self, runs: Sequence[FinishedRun]) -> list[FinishedRun]:
        """Return the runs with a value that have not failed; of several tasks none is best."""
        return [run for run in runs if self.last(run) is not None and run.state.name != "failed"]

    def last(self, run: FinishedRun) -> float | None:
        """Return the last value of the metric in a run."""
        return run.last(self.metric) if self.metric is not None else None


def tasks_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of the runs' tasks: their values of one metric are not of one scale."""
    return list(dict.fromkeys(run.task for run in runs))


def goal_of(runs: Sequence[FinishedRun], metric: str | None = None) -> Goal:
    """Return what a callback of the runs monitors, or the given metric,
    with its mode if a callback monitors that one.
    """
    for run in runs:
        for key, value in run.settings.items():
            if (
                key.startswith("callbacks.")
                and key.endswith(".monitor")
                and value
                and metric in (None, value)
            ):
                return Goal(
                    str(value), str(run.settings.get(key.removesuffix("monitor") + "mode") or "min")
                )
    return Goal(metric)


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
    """Return the typed settings, of a trial without those that its search adds:
    Tune lets one resume from another's weights.
    """
    own = (*_OF_A_TRIAL, "ckpt_path") if _TRIAL in run.overrides else ()
    return [key for key in run.overrides if key not in (*_NOT_COMPARED, *own)]


def table_of(
    runs: Sequence[FinishedRun], goal: Goal, searched: Collection[str] | None = None
) -> Grid:
    """Return a row for each run; `searched` as for `differing`."""
    settings = dict(list(differing(runs, searched).items())[:_MOST_SETTINGS])
    known = dict.fromkeys(name for run in runs for name in run.series)
    names = [name for name in known if name.startswith("val/")] or [
        name for name in known if name.startswith("train/")
    ]
    names = list(dict.fromkeys([*([goal.metric] if goal.metric in known else []), *names]))[
        :_MOST_VALUES
    ]
    best = [f"best {goal.metric}"] * (goal.mode is not None and goal.metric in known)
    top = goal.best_run(runs)
    rows = [
        (
            f"{run.name} *" if run is top else run.name,
            *(texts[i] for texts in settings.values()),
            *(number(run.last(name)) for name in names),
            *(number(goal.best_value(run)) for _ in best),
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
) -> None:
    """Print the table as wide as the console is;
    below it what it leaves out, and the first errors.
    """
    grid, left_out = table_of(runs, goal, searched).fitted(
        console.width, ("state", goal.metric or "")
    )
    console.print(grid.rich())
    if left_out:
        console.print(f"no room for {', '.join(left_out)}", soft_wrap=True, markup=False)
    failed = [run for run in runs if run.state.error]
    for run in failed[:_MOST_ERRORS]:
        console.print(
            f"error   run {run.name}: {_first_line(run.state.error)}", soft_wrap=True, markup=False
        )
    if len(failed) > _MOST_ERRORS:
        console.print(f"error   {len(failed) - _MOST_ERRORS} more; runs --json prints all")


def facts_of(runs: Sequence[FinishedRun], goal: Goal) -> dict[str, Any]:
    """Return what the table shows, and more, as plain values."""
    settings, top = differing(runs), goal.best_run(runs)
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
                    name: {"last": v[-1], "min": min(v), "max": max(v)}
                    for name, (_, v) in run.series.items()
                },
            }
            for run in runs
        ],
        "metric": goal.metric,
        "mode": goal.mode,
        "best": top.name if top else None,
        "command": command_of(top) if top else None,
    }


def command_of(run: FinishedRun) -> str | None:
    """Return the command that repeats a run, ranks included, in a new folder;
    None for a run from Python code.
    """
    if (conf := run.overrides.get("conf")) is None:
        return None
    launcher, ranks = (run.progress.launcher, run.progress.ranks) if run.progress else ("none", 1)
    left_out = ("conf", "run_dir", "optimized_metric", *_OF_A_TRIAL)
    words = [
        f"{key}={value}" if value else key
        for key, value in run.overrides.items()
        if key not in left_out
    ]
    if launcher == "ray" and "launcher" not in run.overrides:
        words += ["launcher=ray", f"launcher.num_workers={ranks}"]
    start = (
        "python" if "launcher" in run.overrides else _STARTS.get(launcher, "python").format(ranks)
    )
    return f"{start} -m trainkit fit {shlex.join([f'conf={conf}', *words])}"


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
    metrics = dict.fromkeys(metric for run in runs for metric in run.series)
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
        is_missing = value is None or value == "-"
        return is_missing != is_reversed, size, text

    return sorted(runs, key=place, reverse=is_reversed)


def number(value: float | None) -> str:
    """Format a metric."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
