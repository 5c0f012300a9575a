"""The page of a learning-rate range test."""

from __future__ import annotations

import math

import pytest

from trainkit.extensions.find.page import lr_chart

LRS = [10 ** (i / 10 - 6) for i in range(60)]
LOSSES = [2.0 - 1.5 * i / 58 for i in range(59)] + [444.0]


def test_labels_are_at_their_lines() -> None:
    """On a logarithmic axis a line is placed by its rate, and a label by the rate's logarithm."""
    suggested = [("steepest", 2e-3, ""), ("valley", 1e-3, "")]
    layout = lr_chart(LRS, LOSSES, LOSSES, suggested).layout
    assert [line.x0 for line in layout.shapes] == [2e-3, 1e-3]
    places = [math.log10(2e-3), math.log10(1e-3)]
    assert [label.x for label in layout.annotations] == pytest.approx(places)
    assert len({label.y for label in layout.annotations}) == 2


def test_one_large_loss_does_not_flatten_the_curve() -> None:
    """The picture ends above the fall; without such a loss it holds all."""
    low, top = lr_chart(LRS, LOSSES, LOSSES, []).layout.yaxis.range
    assert low < 0.5 and 2.0 < top < 4.0
    assert lr_chart(LRS[:59], LOSSES[:59], LOSSES[:59], []).layout.yaxis.range is None


@pytest.mark.parametrize(
    ("rates", "sides"),
    [
        ([3e-3, 6e-5], ["left", "right"]),  # each away from the other's line
        ([6e-5, 3e-3], ["right", "left"]),
        ([0.5, 0.03], ["right", "right"]),  # inside of the picture, whose right edge is near
        ([3e-8], ["left"]),
    ],
)
def test_a_label_crosses_no_other_line(rates: list[float], sides: list[str]) -> None:
    """Nor the edge of the picture."""
    lrs = [10.0**exponent for exponent in range(-8, 1)]
    values = [1.0] * len(lrs)
    suggested = [("steepest", rate, f"task.lr={rate}") for rate in rates]
    chart = lr_chart(lrs, values, values, suggested)
    assert [label.xanchor for label in chart.layout.annotations] == sides
