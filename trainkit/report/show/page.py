"""The page of one run or several:
a chart for each kind of value, rates, throughput, checkpoints, and what differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from trainkit.report.grid import Grid, human
from trainkit.report.page import Section, figure, write_page
from trainkit.report.show.files import RATE, FinishedRun, Series
from trainkit.report.show.table import number

_COLORS = (
    "#2f6fb3",
    "#d1495b",
    "#3f9c6b",
    "#e0a100",
    "#8a63b8",
    "#1d2733",
    "#7fb3e6",
    "#c97b3d",
    "#9aa5b1",
    "#5aa9a3",
)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STAGES = ("train", "val", "test")
_NOT_COMPARED = ("run_dir", "conf")
_MOST_SETTINGS = 60
_MOST_VALUES = 6


def write_show_page(path: Path, runs: Sequence[FinishedRun]) -> None:
    """Write the page of runs."""
    parts = [Section("Last values", grid=runs_grid(runs), id="runs")]
    if (differ := settings_grid(runs)) is not None:
        parts.append(Section("What differs", grid=differ, id="settings"))
    for title, names in groups(runs).items():
        parts.append(Section(title, chart=_curves(runs, names), id=title.replace(" ", "-")))
    if any(run.rates()[0] for run in runs):
        parts.append(
            Section("Samples per second", chart=_throughput(runs), note=_RATES, id="rates")
        )
    if any(run.checkpoints for run in runs):
        parts.append(Section("Checkpoints", grid=checkpoints_grid(runs), id="checkpoints"))
    of = str(runs[0].folder) if len(runs) == 1 else ", ".join(run.name for run in runs)
    write_page(path, "Run" if len(runs) == 1 else "Runs", of, _cards(runs), parts)


def groups(runs: Sequence[FinishedRun]) -> dict[str, list[str]]:
    """Return the metrics of each chart:
    "loss" of training and validation together, learning rates, others by their prefix.
    """
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.series):
        room, _, rest = name.partition("/")
        if name == RATE:
            continue
        if name == "lr" or room.startswith("lr-"):
            title = "learning rate"
        elif room in _STAGES and rest:
            title = rest.removesuffix("_step").removesuffix("_epoch").split("/dataloader_idx_")[0]
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
        found.setdefault(title, []).append(name)
    order = sorted(
        found,
        key=lambda title: (title != "loss", title == "learning rate", not _of_stage(found[title])),
    )
    return {title: found[title] for title in order}


def _of_stage(names: Sequence[str]) -> bool:
    return any(name.split("/")[0] in _STAGES for name in names)


def runs_grid(runs: Sequence[FinishedRun]) -> Grid:
    """Return a row for each run: its length, its last values, its rate."""
    known = dict.fromkeys(name for run in runs for name in run.series)
    names = [n for n in known if n.startswith(("val/", "test/"))] or [
        n for n in known if n.startswith("train/")
    ]
    names = names[:_MOST_VALUES]
    rows = [
        (
            run.name,
            str(run.epochs),
            f"{run.steps:,}",
            *(number(run.last(name)) for name in names),
            number(_middle(run.rates())),
        )
        for run in runs
    ]
    return Grid("", ("run", "epochs", "steps", *names, "samples/s"), rows)


def settings_grid(runs: Sequence[FinishedRun]) -> Grid | None:
    """Return the settings that differ between runs; None if there are none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _NOT_COMPARED)
    values = {key: [str(run.settings.get(key, "-")) for run in runs] for key in keys}
    differ = {key: shown for key, shown in values.items() if len(set(shown)) > 1}
    # A group that the task refers to is in the resolved config twice: optimizer.lr and
    # task.optimizer.lr.
    rows = [
        (k, *shown)
        for k, shown in differ.items()
        if differ.get(k.removeprefix("task.")) != shown or not k.startswith("task.")
    ]
    rows = rows[:_MOST_SETTINGS]
    return Grid("", ("setting", *(run.name for run in runs)), rows, is_code=True) if rows else None


def checkpoints_grid(runs: Sequence[FinishedRun]) -> Grid:
    """Return a row for each checkpoint."""
    known = dict.fromkeys(
        name for run in runs for saved in run.checkpoints for name in saved.metrics
    )
    metrics = [name for name in known if name.startswith("val/")][:_MOST_VALUES]
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
    return Grid(
        "", ("checkpoint", "", "epoch", "step", *metrics, "size", "written (UTC)"), rows, (1,)
    )


def _cards(runs: Sequence[FinishedRun]) -> list[tuple[str, str]]:
    if len(runs) > 1:
        return [
            ("runs", str(len(runs))),
            ("steps, the longest", f"{max(run.steps for run in runs):,}"),
        ]
    (run,) = runs
    cards = [("epochs", str(run.epochs)), ("steps", f"{run.steps:,}")]
    best = next((saved for saved in run.checkpoints if "best" in saved.marks), None)
    monitors = [
        value
        for key, value in run.settings.items()
        if key.startswith("callbacks.") and key.endswith(".monitor")
    ]
    monitored = str(monitors[0]) if monitors else ""
    if best is not None and monitored in best.metrics:
        cards.append((f"{monitored}, best (step {best.step:,})", number(best.metrics[monitored])))
    if (rate := _middle(run.rates())) is not None:
        cards.append(("samples/s, median", number(rate)))
    if total := sum(run.goodput.values()):
        cards.append(("goodput", f"{100 * run.goodput.get('steps', 0.0) / total:.1f} %"))
    return cards


def _curves(runs: Sequence[FinishedRun], names: Sequence[str]) -> go.Figure:
    chart = figure("step", "")
    for label, (steps, values), line in _lines(runs, names):
        mode = "lines+markers" if len(steps) <= 30 else "lines"
        chart.add_scatter(
            x=steps, y=values, name=label, mode=mode, line=line, marker={"size": 5}, showlegend=True
        )
    return chart


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
                yield name, run.series[name], {"color": _COLORS[j % len(_COLORS)]}
            else:
                line = {"color": _COLORS[i % len(_COLORS)], "dash": _DASHES[j % len(_DASHES)]}
                yield f"{run.name}: {name}", run.series[name], line


def _throughput(runs: Sequence[FinishedRun]) -> go.Figure:
    chart = figure("step", "samples/s", height=320)
    for i, run in enumerate(runs):
        steps, values = run.rates()
        color = _COLORS[i % len(_COLORS)]
        chart.add_scatter(
            x=steps,
            y=values,
            name=run.name,
            mode="lines+markers",
            line={"color": color},
            showlegend=True,
        )
    chart.update_yaxes(rangemode="tozero")
    return chart


def _middle(series: Series) -> float | None:
    values = sorted(series[1])
    return values[len(values) // 2] if values else None


_RATES = (
    "Of all ranks, by callbacks=throughput; of a run without it from the times of its checkpoints,"
    " validation and writing included."
)
