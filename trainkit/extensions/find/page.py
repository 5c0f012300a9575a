"""The page of a learning-rate range test: the curve, and the rates that it suggests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainkit.console import plural
from trainkit.extensions.reports.colors import BLUE, GREEN, GREY, RED
from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.page import Figure, Section, figure, write_page

_NOTE = (
    "Each step is trained at the next rate. The loss is the mean over all samples of a step, on all"
    " ranks, before its update; the line is a mean over a tenth of the curve. Steepest: where the"
    " loss falls most against the rate's logarithm (Smith 2017, section 3.3). Valley: the middle of"
    " the longest falling part (fastai). Rates are those that a config names; the contract of batch"
    " and rate multiplies them."
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
    chart = lr_chart(lrs, losses, smoothed, suggested)
    if above := sum(loss > (chart.layout.yaxis.range or (0, math.inf))[1] for loss in losses):
        notes = [
            *notes,
            (
                f"Not in the picture: {plural(above, 'step')} with a larger loss, up to"
                f" {max(losses):.4g}."
            ),
        ]
    rows = [(name, f"{rate:.2g}", override) for name, rate, override in suggested]
    grid = (
        Grid("Rates to try", ("method", "rate", "override"), rows, sentences=(2,)) if rows else None
    )
    cards = [(name, f"{rate:.2g}") for name, rate, _ in suggested]
    write_page(
        path,
        "Learning rates",
        of,
        cards,
        [Section("The curve", tuple(notes), chart, grid, _NOTE, id="curve")],
    )


def lr_chart(
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggested: Sequence[tuple[str, float, str]],
) -> Figure:
    """Return the curve with a line for each suggestion; see `write_lr_page`."""
    chart = figure("learning rate", "loss", height=420)
    chart.add_scatter(
        x=list(lrs),
        y=list(losses),
        name="loss",
        mode="markers",
        marker={"size": 5, "color": GREY},
    )
    chart.add_scatter(
        x=list(lrs),
        y=list(smoothed),
        name="smoothed",
        mode="lines",
        line={"color": BLUE, "width": 2},
    )
    for i, (name, rate, _) in enumerate(suggested):
        color = (RED, GREEN)[i]
        chart.add_vline(x=rate, line={"color": color, "dash": "dash"})
        side = _side(rate, [other for _, other, _ in suggested], lrs)
        label = {"text": f"{name} {rate:.2g}", "xanchor": side, "font": {"color": color}}
        # On a logarithmic axis plotly places a line by its value, and a label by the value's
        # logarithm.
        chart.add_annotation(
            x=math.log10(rate), y=1 - 0.06 * i, yref="paper", showarrow=False, **label
        )
    chart.update_xaxes(type="log", exponentformat="e")
    if losses and max(losses) > (top := _top(losses, smoothed)):
        least = min(losses)
        chart.update_yaxes(range=[least - 0.1 * (top - least), top])
    return chart


def _side(rate: float, suggested: Sequence[float], lrs: Sequence[float]) -> str:
    """Return which end of a label is at its line: it points away from the other lines, and stays in
    the picture.
    """
    place = math.log(rate / lrs[0]) / math.log(lrs[-1] / lrs[0])
    is_left = rate < max(suggested) or place > 0.75
    return "right" if is_left and place > 0.25 else "left"


def _top(losses: Sequence[float], smoothed: Sequence[float]) -> float:
    """Return the top of the picture:
    the fall of the curve decides, not the losses of rates that are too large.
    """
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    highest = max(*smoothed[: lowest + 1], statistics.median(losses))
    return highest + 0.5 * (highest - min(losses))
