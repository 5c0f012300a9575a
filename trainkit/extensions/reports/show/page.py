"""The page of one run or several:
a chart for each kind of value, rates, throughput, checkpoints, and what differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from trainkit.extensions.reports.colors import LINES
from trainkit.extensions.reports.grid import Grid, human
from trainkit.extensions.reports.page import Section, figure, write_page
from trainkit.extensions.reports.show.best import number
from trainkit.extensions.reports.show.differences import settings_grid
from trainkit.extensions.reports.show.files import RATE, FinishedRun, Series, main_values, stage_of
from trainkit.run.goal import monitored as monitored_in

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_MOST_VALUES = 6
_FEW_STEPS = 10  # between the first and the last: ticks one step apart still fit a telephone


def write_show_page(path: Path, runs: Sequence[FinishedRun]) -> None:
    """Write the page of runs: first their charts, then what was reached, and with which settings.
    Runs of one task are together, for values of two tasks are not of one scale.
    """
    runs = by_task(runs)
    tasks = list(dict.fromkeys(run.task for run in runs))
    groups_of_runs = [[run for run in runs if run.task == task] for task in tasks]
    parts: list[Section] = []
    for same in groups_of_runs:
        of = f", {same[0].task or 'unknown task'}" if len(tasks) > 1 else ""
        parts += [
            Section(f"{title}{of}", chart=curves(same, names), id=_id(f"{title}{of}"))
            for title, names in groups(same).items()
        ]
    if any(run.rates()[0] for run in runs):
        parts.append(Section("Samples per second", chart=throughput(runs), note=_RATES, id="rates"))
    parts.append(Section("Last values", grid=runs_grid(runs), id="runs"))
    for same in groups_of_runs:
        if (differ := settings_grid(same)) is not None:
            of = f", {same[0].task or 'unknown task'}" if len(tasks) > 1 else ""
            parts.append(Section(f"What differs{of}", grid=differ, id=_id(f"settings{of}")))
    if any(run.checkpoints for run in runs):
        parts.append(Section("Checkpoints", grid=checkpoints_grid(runs), id="checkpoints"))
    under = str(runs[0].folder) if len(runs) == 1 else ", ".join(run.name for run in runs)
    write_page(path, "Run" if len(runs) == 1 else "Runs", under, _cards(runs), parts)


def by_task(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs with those of one task side by side, in the order of the first of each."""
    tasks = [run.task for run in runs]
    return sorted(runs, key=lambda run: tasks.index(run.task))


def _id(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def groups(runs: Sequence[FinishedRun]) -> dict[str, list[str]]:
    """Return the metrics of each chart:
    "loss" of training and validation together, learning rates, others by their prefix.
    """
    charts: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.series):
        room, _, rest = name.partition("/")
        stage, of_stage = stage_of(name)
        if name == RATE:
            continue
        if name == "lr" or room.startswith("lr-"):
            title = "learning rate"
        elif stage:
            title = (
                of_stage.removesuffix("_step").removesuffix("_epoch").split("/dataloader_idx_")[0]
            )
        elif room == "throughput":
            title = (
                "step time, ms"
                if rest.startswith("step_ms")
                else "shares of a step"
                if rest.endswith("_share")
                else rest
            )
        else:
            title = room
        charts.setdefault(title, []).append(name)
    order = sorted(
        charts,
        key=lambda title: (title != "loss", title == "learning rate", not _of_stage(charts[title])),
    )
    return {title: charts[title] for title in order}


def _of_stage(names: Sequence[str]) -> bool:
    return any(stage_of(name)[0] for name in names)


def runs_grid(runs: Sequence[FinishedRun]) -> Grid:
    """Return a row for each run: its length, its last values, its rate."""
    known = dict.fromkeys(name for run in runs for name in run.series)
    names = main_values(known, "val", "test")[:_MOST_VALUES]
    has_tasks = len({run.task for run in runs}) > 1
    rows = [
        (
            run.name,
            *([run.task or "-"] if has_tasks else []),
            str(run.epochs),
            f"{run.steps:,}",
            *(number(run.last(name)) for name in names),
            number(run.samples_per_s),
        )
        for run in runs
    ]
    columns = ("run", *(["task"] if has_tasks else []), "epochs", "steps", *names, "samples/s")
    return Grid("", columns, rows, (1,) if has_tasks else ())


def checkpoints_grid(runs: Sequence[FinishedRun]) -> Grid:
    """Return a row for each checkpoint."""
    known = dict.fromkeys(
        name for run in runs for saved in run.checkpoints for name in saved.metrics
    )
    metrics = main_values(known, "val")[:_MOST_VALUES]
    rows = [
        (
            f"{run.name}/{saved.name}" if len(runs) > 1 else saved.name,
            ", ".join(saved.marks),
            str(saved.epoch),
            f"{saved.step:,}",
            *(number(saved.metrics.get(name)) for name in metrics),
            human(saved.num_bytes),
            f"{saved.written:%Y-%m-%d %H:%M:%S}" if saved.written else "-",
        )
        for run in runs
        for saved in run.checkpoints
    ]
    columns = ("checkpoint", "", "epoch", "step", *metrics, "size", "written (UTC)")
    return Grid("", columns, rows, (1,), is_code=True)


def _cards(runs: Sequence[FinishedRun]) -> list[tuple[str, str]]:
    if len(runs) > 1:
        return [
            ("runs", str(len(runs))),
            ("steps, the longest", f"{max(run.steps for run in runs):,}"),
        ]
    (run,) = runs
    cards = [("epochs", str(run.epochs)), ("steps", f"{run.steps:,}")]
    best = next((saved for saved in run.checkpoints if "best" in saved.marks), None)
    monitored = next(iter(monitored_in(run.settings)), "")
    if best is not None and monitored in best.metrics:
        cards.append((f"{monitored}, best (step {best.step:,})", number(best.metrics[monitored])))
    if (rate := run.samples_per_s) is not None:
        cards.append(("samples/s", number(rate)))
    if total := sum(run.goodput.values()):
        cards.append(("goodput", f"{100 * run.goodput.get('steps', 0.0) / total:.1f} %"))
    return cards


def curves(runs: Sequence[FinishedRun], names: Sequence[str]) -> go.Figure:
    """Return the chart of these values of runs by step."""
    chart = figure("step", "")
    for label, (steps, values), line in _lines(runs, names):
        mode = "lines+markers" if len(steps) <= 30 else "lines"
        chart.add_scatter(
            x=steps, y=values, name=label, mode=mode, line=line, marker={"size": 5}, showlegend=True
        )
    heights = {value for line in chart.data for value in line.y}
    if (
        len(heights) == 1
    ):  # else from one below it to one above it: a rate of 0.02 would look like 0
        chart.update_yaxes(range=sorted([0, 2 * min(heights)]) if any(heights) else [0, 1])
    return _with_whole_steps(chart)


def _lines(
    runs: Sequence[FinishedRun], names: Sequence[str]
) -> Iterator[tuple[str, Series, dict[str, Any]]]:
    """Yield label, values and style of each line:
    a color for each metric of one run, or for each run of several.
    """
    for i, run in enumerate(runs):
        for j, name in enumerate(names):
            if name not in run.series:
                continue
            if len(runs) == 1:
                yield name, run.series[name], {"color": LINES[j % len(LINES)]}
            else:
                line = {"color": LINES[i % len(LINES)], "dash": _DASHES[j % len(_DASHES)]}
                yield f"{run.name}: {name}", run.series[name], line


def throughput(runs: Sequence[FinishedRun]) -> go.Figure:
    """Return the chart of the samples per second of runs by step."""
    chart = figure("step", "samples/s", height=320)
    for i, run in enumerate(runs):
        steps, values = run.rates()
        color = LINES[i % len(LINES)]
        chart.add_scatter(
            x=steps,
            y=values,
            name=run.name,
            mode="lines+markers",
            line={"color": color},
            showlegend=True,
        )
    chart.update_yaxes(rangemode="tozero")
    return _with_whole_steps(chart)


def _with_whole_steps(chart: go.Figure) -> go.Figure:
    """Let few steps, or one, have ticks at whole numbers; of many plotly's ticks are whole."""
    steps = {step for line in chart.data for step in line.x}
    if steps and max(steps) - min(steps) <= _FEW_STEPS:
        chart.update_xaxes(dtick=1, tick0=0)
    if len(steps) == 1:
        chart.update_xaxes(range=[min(steps) - 1.5, min(steps) + 1.5])
    return chart


_RATES = (
    "Of all ranks, by callbacks=throughput; of a run without it from the times of its checkpoints,"
    " validation and writing included."
)
