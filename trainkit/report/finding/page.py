"""The page of a learning-rate range test: the curve, and the rates that it suggests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.report.grid import Grid
from trainkit.report.page import Part, figure, write_page

_NOTE = (
    "Each step is trained at the next rate. The loss is the mean over all samples of a step, on all ranks, before its update; "
    "the line is a mean over a tenth of the curve. Steepest: where the loss falls most against the rate's logarithm (Smith "
    "2017, section 3.3). Valley: the middle of the longest falling part (fastai). Rates are those that a config names; the "
    "contract of batch and rate multiplies them."
)


def write_lr_page(
    path: Path,
    of: str,
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggested: Sequence[tuple[str, float, str]],
    notes: Sequence[str],
) -> None:
    """Write the page.

    Args:
        of: names the config.
        lrs: of each step.
        losses: of each step.
        smoothed: the same, smoothed.
        suggested: name of a method, its rate, the override to type.
        notes: sentences above the curve.
    """
    chart = figure("learning rate", "loss", height=420)
    chart.add_scatter(x=list(lrs), y=list(losses), name="loss", mode="markers", marker={"size": 5, "color": "#9aa5b1"})
    chart.add_scatter(x=list(lrs), y=list(smoothed), name="smoothed", mode="lines", line={"color": "#2f6fb3", "width": 2})
    for (name, rate, _), color in zip(suggested, ("#d1495b", "#3f9c6b"), strict=False):
        chart.add_vline(x=rate, line={"color": color, "dash": "dash"}, annotation_text=f"{name} {rate:.2g}")
    chart.update_xaxes(type="log")
    rows = [(name, f"{rate:.2g}", override) for name, rate, override in suggested]
    grid = Grid("Rates to try", ("method", "rate", "override"), rows, sentences=(2,)) if rows else None
    cards = [(name, f"{rate:.2g}") for name, rate, _ in suggested]
    write_page(path, "Learning rates", of, cards, [Part("The curve", tuple(notes), chart, grid, _NOTE, id="curve")])
