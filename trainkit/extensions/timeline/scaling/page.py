"""The page of a scaling report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from trainkit.console import plural
from trainkit.extensions.reports.colors import AMBER, BLUE, GREEN, GREY, INK, RED, VIOLET
from trainkit.extensions.reports.grid import ms
from trainkit.extensions.reports.page import Section, figure, write_page
from trainkit.extensions.timeline.report.page import COLORS
from trainkit.extensions.timeline.report.recorded_facts import LABELS
from trainkit.extensions.timeline.scaling.model import (
    PREDICTED,
    MeasuredRanks,
    Model,
    check_words,
    excess_words,
    measured_grid,
    network,
    predictions_grid,
)

_LINES = (INK, RED, AMBER, GREEN, BLUE, VIOLET, GREY)


def write_scaling_page(
    path: Path,
    of: str,
    measured: Sequence[MeasuredRanks],
    models: tuple[Model, Model] | None,
    gbits: Sequence[float],
    notes: Sequence[str],
) -> None:
    """Write the page; `of` names the config."""
    best = measured[-1]
    cards = [
        (f"samples/s at {plural(best.ranks, 'rank')}", f"{best.samples_per_s:,.1f}"),
        ("efficiency there", f"{100 * best.efficiency(measured[0]):.1f} %"),
        ("a step there", ms(best.step_s)),
    ]
    parts = [
        Section(
            "Measured",
            (*notes, *excess_words(measured)),
            _parts(measured),
            measured_grid(measured),
            id="measured",
        )
    ]
    if models is not None:
        check, model = models
        off = 100 * (check.step_s(best.ranks) / best.step_s - 1)
        cards += [
            ("predicted efficiency at 64", f"{100 * model.efficiency(64):.0f} %"),
            ("model error", f"{off:+.1f} %"),
        ]
        said = (check_words(check, best), _source(model))
        grid = predictions_grid(model, gbits)
        parts.append(
            Section(
                "Predicted", said, _efficiency(measured, model, gbits), grid, _MODEL, id="predicted"
            )
        )
    write_page(path, "Scaling", of, cards, parts)


def _source(model: Model) -> str:
    ring = model.ring
    return (
        f"Gradients become ready as at {plural(model.of_ranks, 'rank')}. A message between"
        f" neighbours takes {1e6 * ring.alpha_s:.0f} us and {8 * ring.bytes_per_s / 1e9:.2f}"
        f" Gbit/s, from {model.ring_from}. A rank's own work varies by {ms(model.spread_s)}."
    )


def _parts(measured: Sequence[MeasuredRanks]) -> go.Figure:
    chart = figure("ms, median of a step", "", height=200 + 40 * len(measured))
    names = [plural(m.ranks, "rank") for m in measured]
    for part, label in LABELS.items():
        usual = [1000 * m.analysis.median(part) for m in measured]
        chart.add_bar(x=usual, y=names, orientation="h", name=label, marker_color=COLORS[part])
    chart.update_layout(barmode="stack")
    chart.update_yaxes(autorange="reversed")
    return chart


def _efficiency(
    measured: Sequence[MeasuredRanks], model: Model, gbits: Sequence[float]
) -> go.Figure:
    chart = figure("ranks", "efficiency, %", height=420)
    sizes = [1, 2, 4, *PREDICTED]
    rings = [
        ("as measured", model.ring),
        *((f"{speed:g} Gbit/s", network(model.ring, speed)) for speed in gbits),
    ]
    for (name, ring), color in zip(rings, _LINES, strict=False):
        values = [100 * model.efficiency(n, ring) for n in sizes]
        chart.add_scatter(
            x=sizes, y=values, name=name, mode="lines", line={"color": color, "width": 2}
        )
    seen = [100 * m.efficiency(measured[0]) for m in measured]
    marker = {"size": 10, "color": INK, "symbol": "diamond"}
    chart.add_scatter(
        x=[m.ranks for m in measured], y=seen, name="measured here", mode="markers", marker=marker
    )
    chart.update_xaxes(
        type="log", range=[-0.05, 2.8], tickvals=sizes, ticktext=[str(n) for n in sizes]
    )
    chart.update_yaxes(rangemode="tozero")
    return chart


_MODEL = (
    "t(n) = a rank's own work + waiting for the slowest + the part of reductions that backward does"
    " not hide. Own work is as measured; ranks of one host share it, and beyond the largest"
    " measured number hosts like this one are added. A reduction of S bytes in a ring of n: 2(n-1)"
    " alpha + 2(n-1)/n S/B (Patarasuk & Yuan 2009); the hidden part follows from running Horovod's"
    " cycles over the recorded gradients (Sergeev & Del Balso 2018); the slowest of n normal values"
    " by Blom (1958). It models no tree, no congestion, and no other kind of host. NCCL's faster"
    " algorithms make it pessimistic for small reductions."
)
