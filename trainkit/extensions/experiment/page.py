"""The page of an experiment: the differences by seed, and the two intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainkit.extensions.experiment.statistics import Interval
from trainkit.extensions.reports.colors import RED
from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.page import Figure, Section, figure, write_page

_COLORS = {"paired": "#2f6fb3", "unpaired": "#9aa5b1"}


def write_experiment_page(
    path: Path,
    of: str,
    cards: Sequence[tuple[str, str]],
    seeds: Sequence[int],
    differences: Sequence[float],
    intervals: tuple[Interval, Interval],
    grids: Sequence[Grid],
    notes: Sequence[str],
    source: str,
) -> None:
    """Write the page.

    Args:
        path: of the file.
        of: names the sides.
        cards: headline numbers.
        seeds: that have run.
        differences: b - a of each.
        intervals: paired, unpaired.
        grids: by seed; the two intervals.
        notes: sentences above the picture.
        source: of the formulas.
    """
    by_seed, of_intervals = grids
    chart = difference_chart(seeds, differences, *intervals)
    sections = [
        Section("Difference", tuple(notes), chart, of_intervals, source, id="difference"),
        Section("By seed", (), None, by_seed, id="seeds"),
    ]
    write_page(path, "Paired experiment", of, cards, sections)


def difference_chart(
    seeds: Sequence[int], differences: Sequence[float], paired: Interval, unpaired: Interval
) -> Figure:
    """Return the differences by seed, with both intervals beside each other."""
    chart = figure("b - a", "", height=260)
    chart.add_scatter(
        x=list(differences),
        y=["seeds"] * len(differences),
        text=[f"seed {seed}" for seed in seeds],
        mode="markers",
        name="a seed",
        marker={"size": 9, "color": RED},
    )
    for name, one in (("paired", paired), ("unpaired", unpaired)):
        width = one.half_width if math.isfinite(one.half_width) else None
        chart.add_scatter(
            x=[one.difference],
            y=[name],
            mode="markers",
            name=name,
            marker={"size": 9, "color": _COLORS[name]},
            error_x=None if width is None else {"array": [width], "color": _COLORS[name]},
        )
    chart.add_vline(x=0, line={"color": "#1d2733", "dash": "dash"})
    return chart
