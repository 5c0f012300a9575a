"""Which of several runs is best, why none is, and the command that repeats a run: the same for the
end of a sweep and of a search, and for `runs` and `show`.

best_of      by the last value of a goal's metric; of equal ones the first run
command_of   repeats a run
print_best   prints both, or how to choose what runs are compared by
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from rich.console import Console

from trainkit.console import plural
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.reports.show.files import FinishedRun, main_values, natural
from trainkit.run.goal import Goal, monitored
from trainkit.run.progress_file import Progress

_TRIAL = "callbacks.tune"
_OF_A_TRIAL = (_TRIAL, "callbacks.elastic._target_", "ckpt_path")  # a search's own, under Ray
_STARTS = {
    "horovodrun": "horovodrun -np {ranks}{hosts} python",
    "launch": "python -m trainkit launch -np {ranks}{hosts} -- python",
    "mpirun": "mpirun -np {ranks}{hosts} python",
    "torchrun": "torchrun{nnodes} --nproc-per-node {local}",
    "srun": "srun{nodes} --ntasks {ranks} python",
}
_MODES = {"min": "lowest", "max": "highest"}
# Parts of names of metrics of which the largest is best, for the example of a command.
_LARGE = ("acc", "auc", "f1", "precision", "recall", "map", "iou", "dice", "bleu", "psnr", "r2")


def goal_of(runs: Sequence[FinishedRun]) -> Goal:
    """Return the goal of the first run that has one."""
    return next((run.goal for run in runs if run.goal.metric is not None), Goal())


def goal_by(runs: Sequence[FinishedRun], metric: str) -> Goal:
    """Return the goal of this metric, with its mode if a sweep or a callback of a run has one."""
    modes = [run.goal.mode for run in runs if run.goal.metric == metric]
    modes += [monitored(run.settings).get(metric) for run in runs]
    return Goal(metric, next((mode for mode in modes if mode is not None), None))


def chosen_goal(runs: Sequence[FinishedRun], given: Mapping[str, str]) -> Goal:
    """Return the goal that `metric=` and `mode=` of a command ask for, or else that of the runs.

    Raises:
        ConfigError: no run logged the metric, or it is unknown which of its values is best.
    """
    metric, mode = given.get("metric"), given.get("mode")
    if mode is not None and mode not in _MODES:
        raise ConfigError(f"mode is '{mode}'; it must be min or max.")
    if metric is None:
        if mode is not None:
            raise ConfigError(f"mode is {mode}, and metric is missing: metric=NAME mode={mode}.")
        return goal_of(runs)
    known = dict.fromkeys(name for run in runs for name in run.metrics)
    if metric not in known:
        raise ConfigError(
            f"metric is '{metric}', which none of these runs logged."
            f"{did_you_mean(metric, known)} They logged {', '.join(known) or 'nothing'}."
        )
    goal = Goal(metric, mode) if mode is not None else goal_by(runs, metric)
    if goal.mode is None:
        raise ConfigError(
            f"mode is missing: no callback monitors {metric}, so it is unknown whether a small or a"
            " large value is good. Give mode=min or mode=max."
        )
    return goal


def best_of(runs: Sequence[FinishedRun], goal: Goal) -> FinishedRun | None:
    """Return the run with the best last value, which is also what a sweeper receives;
    of equal ones the first by its folder. None if it is unknown.
    """
    scores = _scores(runs, goal)
    if goal.mode is None or not scores or len(tasks_of([run for run, _ in scores])) > 1:
        return None
    sign = 1.0 if goal.mode == "min" else -1.0
    return min(scores, key=lambda scored: (sign * scored[1], natural(str(scored[0].folder))))[0]


def _scores(runs: Sequence[FinishedRun], goal: Goal) -> list[tuple[FinishedRun, float]]:
    """Return the runs that are compared, each with its value: neither one that failed, nor one
    whose last value is not finite.
    """
    values = [] if goal.metric is None else [(run, run.last(goal.metric)) for run in runs]
    return [
        (run, value)
        for run, value in values
        if value is not None and math.isfinite(value) and run.state.name != "failed"
    ]


def tasks_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the names of the runs' tasks: their values of one metric are not of one scale."""
    return list(dict.fromkeys(run.task for run in runs))


def command_of(run: FinishedRun) -> str | None:
    """Return the command that repeats a run, ranks included, in a new folder;
    None for a run from Python code.
    """
    if (conf := run.overrides.get("conf")) is None:
        return None
    launcher, ranks = (run.progress.launcher, run.progress.ranks) if run.progress else ("none", 1)
    left_out = ("conf", "run_dir", "optimized_metric", *of_a_search(run))
    typed = [
        key if key.startswith("~") and not value else f"{key}={value}"
        for key, value in run.overrides.items()
        if key not in left_out
    ]
    start = _start_of(run.progress) if run.progress else "python"
    if "launcher" in run.overrides:
        start = "python"
    elif _TRIAL in run.overrides and run.goal.start:
        start = "python"
        typed += run.goal.start
    elif launcher == "ray":
        typed += ["launcher=ray", f"launcher.num_workers={ranks}"]
    return f"{start} -m trainkit fit {shlex.join([f'conf={conf}', *typed])}"


def _start_of(progress: Progress) -> str:
    """Return what starts as many ranks on as many hosts."""
    sizes = {host: len(own) for host, own in progress.hosts.items()}
    places = ",".join(f"{host}:{size}" for host, size in sizes.items())
    several = len(sizes) > 1
    start = _STARTS.get(progress.launcher, "python")
    return start.format(
        ranks=progress.ranks,
        local=max(sizes.values(), default=1),
        hosts=f" -H {places}" * several,
        nodes=f" --nodes {len(sizes)}" * several,
        nnodes=f" --nnodes {len(sizes)}" * several,
    )


def of_a_search(run: FinishedRun) -> tuple[str, ...]:
    """Return the overrides of a run that its search has added: Tune lets a trial resume from the
    weights of another.
    """
    return _OF_A_TRIAL if _TRIAL in run.overrides else _OF_A_TRIAL[:2]


def print_best(
    runs: Sequence[FinishedRun], goal: Goal, console: Console, look: Sequence[str]
) -> None:
    """Print the best run and the command that repeats it; or why none is best, and the command
    that chooses.

    Args:
        runs: that are compared.
        goal: by which.
        console: to print on.
        look: the command that shows these runs, as ["runs", "runs/mlp"].
    """

    def line(name: str, text: str) -> None:
        console.print(f"{name:<8}{text}", soft_wrap=True)  # in one piece, to be copied

    best = best_of(runs, goal)
    if best is not None:
        value = number(best.last(str(goal.metric)))
        compared = plural(len(_scores(runs, goal)), "run")
        how = f"the last value, {_MODES[str(goal.mode)]} of {compared}"
        line("best", f"run {best.name}: {goal.metric} = {value} ({how})")
    elif len(runs) > 1:
        line("best", _why_none(runs, goal))
        if goal.mode is None and (example := _example(runs, goal)):
            command = ["python", "-m", "trainkit", *look, *example]
            line("choose", shlex.join(command))
    again = best or (runs[0] if len(runs) == 1 else None)
    if again is not None and (command_again := command_of(again)) is not None:
        line("repeat", command_again)
        for why in filter(None, (_why_different(again), _how_started(again))):
            line("note", why)


def _why_none(runs: Sequence[FinishedRun], goal: Goal) -> str:
    if goal.metric is None:
        return "unknown: no callback of these runs monitors a value to compare by"
    if goal.mode is None:
        return f"unknown: no callback monitors {goal.metric}, so small or large may be good"
    tasks = tasks_of([run for run, _ in _scores(runs, goal)])
    if len(tasks) > 1:
        return (
            f"none of {plural(len(tasks), 'task')} ({', '.join(tasks)}): {goal.metric} is not"
            " comparable. Give a folder with runs of one task."
        )
    return f"none: no run has ended well with a finite {goal.metric}"


def _example(runs: Sequence[FinishedRun], goal: Goal) -> list[str]:
    """Return the words that choose a goal, for a value that these runs logged."""
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    named = [name for name in (goal.metric,) if name in known]
    metric = next(iter([*named, *main_values(known, "val")]), None)
    if metric is None:
        return []
    name = metric.rpartition("/")[2]
    return [f"metric={metric}", f"mode={'max' if any(p in name for p in _LARGE) else 'min'}"]


def _why_different(run: FinishedRun) -> str:
    """Return what the command does otherwise than a trial of a search; "" if nothing."""
    if _TRIAL not in run.overrides:
        return ""
    if "ckpt_path" in run.overrides:
        return "the search started it from a checkpoint; the command trains from the first step"
    planned = run.settings.get("trainer.max_epochs")
    if isinstance(planned, int) and run.epochs < planned:
        return f"the search ended it after epoch {run.epochs}; the command trains all {planned}"
    return ""


def _how_started(run: FinishedRun) -> str:
    """Return what the command leaves to the user of how the ranks are started; "" if nothing."""
    progress = run.progress
    if progress is None or progress.ranks == 1 or "launcher" in run.overrides:
        return ""
    where = f"{plural(progress.ranks, 'rank')} on {plural(len(progress.hosts), 'host')}"
    if progress.launcher == "env":
        return f"it ran as {where}, started by MASTER_ADDR, RANK and WORLD_SIZE: start as many"
    if progress.launcher == "torchrun" and len(progress.hosts) > 1:
        return (
            f"it ran as {where}: start it on each, with --rdzv-backend c10d --rdzv-endpoint"
            f" {next(iter(progress.hosts))}:29500"
        )
    return ""


def number(value: float | None) -> str:
    """Format a metric."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
