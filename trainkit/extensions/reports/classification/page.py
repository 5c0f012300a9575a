"""The page of a test of a classifier: its charts."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go

from trainkit.extensions.reports.classification.facts import Classified
from trainkit.extensions.reports.colors import BLUE, CARD, GREY, HEAT, INK, SKY
from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.page import Picture, Section, figure, write_page

_HEATMAP, _ROWS, _PAIRS = 60, 100, 20  # classes and rows shown at most


def write_classification_page(path: Path, of: str, results: Classified) -> None:
    """Write the page of a test; `of` names the checkpoint."""
    scores = results.scores()
    known = [score.f1 for score in scores if score.count]
    cards = [
        ("accuracy", f"{100 * results.accuracy:.2f} %"),
        ("mean F1 of classes", f"{sum(known) / max(1, len(known)):.4f}"),
        ("calibration error", f"{100 * results.calibration_error:.2f} %"),
        ("samples", f"{results.num_samples:,}"),
        ("classes", str(len(results.names))),
    ]
    pairs = Grid(
        "",
        ("label", "predicted", "samples"),
        [(a, b, str(n)) for a, b, n in results.confused(_PAIRS)],
        (1,),
    )
    chart = _confusion(results) if len(results.names) <= _HEATMAP else None
    parts = [
        Section("Scores by class", grid=_scores(results), note=_SCORES, id="classes"),
        Section(
            "Confusion",
            chart=chart,
            grid=pairs,
            note="The pairs that are confused most often." if pairs.rows else "",
            id="confusion",
            empty="No class was predicted in place of another.",
        ),
        Section("Calibration", chart=_calibration(results), note=_CALIBRATION, id="calibration"),
        Section(
            "Worst samples",
            pictures=_worst(results),
            note="The largest losses first." if results.worst else "",
            id="worst",
            empty="No sample was recorded.",
        ),
    ]
    write_page(path, "Test", of, cards, parts)


def _confusion(results: Classified) -> go.Figure:
    names = list(results.names)
    chart = figure("predicted", "label", height=180 + min(720, 26 * len(names)))
    counts = results.confusion.astype(int)
    of_label = results.confusion / results.confusion.sum(1, keepdims=True).clip(min=1.0)
    text = counts.astype(str).tolist() if len(names) <= 25 else None
    chart.add_heatmap(
        z=of_label.tolist(),
        x=names,
        y=names,
        customdata=counts.tolist(),
        text=text,
        texttemplate="%{text}" if text else None,
        textfont={"color": INK},
        colorscale=[(0, CARD), (1, HEAT)],
        zmin=0,
        zmax=1,
        hovertemplate="%{customdata} of label %{y}, predicted %{x}<extra></extra>",
        colorbar={"title": "share of label"},
    )
    chart.update_xaxes(type="category", side="bottom")
    chart.update_yaxes(type="category", autorange="reversed")
    return chart


def _scores(results: Classified) -> Grid:
    def shown(value: float) -> str:
        return "-" if value != value else f"{value:.4f}"  # noqa: PLR0124 - NaN

    worst = sorted(results.scores(), key=lambda score: (score.f1 == score.f1, score.f1))[:_ROWS]  # noqa: PLR0124
    rows = [
        (s.name, f"{s.count:,}", shown(s.precision), shown(s.recall), shown(s.f1)) for s in worst
    ]
    return Grid("", ("class", "samples", "precision", "recall", "F1"), rows)


def _calibration(results: Classified) -> go.Figure:
    counts, confidences, correct = results.bins
    chart = figure("confidence", "accuracy", height=340)
    used = [i for i, count in enumerate(counts) if count]
    x, y = ([float(values[i] / counts[i]) for i in used] for values in (confidences, correct))
    chart.add_scatter(
        x=[0, 1],
        y=[0, 1],
        mode="lines",
        name="calibrated",
        line={"color": GREY, "dash": "dot"},
    )
    size = [6 + 24 * float(counts[i] / counts.max()) ** 0.5 for i in used]
    labels = [f"{int(counts[i]):,} samples" for i in used]
    marker = {"size": size, "color": BLUE}
    chart.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name="tested",
        marker=marker,
        text=labels,
        line={"color": SKY},
    )
    chart.update_xaxes(range=[0, 1.02])
    chart.update_yaxes(range=[0, 1.05])
    return chart


def _worst(results: Classified) -> list[Picture]:
    return [
        Picture(
            sample.png,
            f"{results.names[sample.label]}, predicted {results.names[sample.prediction]}"
            f" ({100 * sample.probability:.0f} %)",
            sample.name,
        )
        for sample in results.worst
    ]


_SCORES = (
    "The lowest F1 first. Precision: of the samples predicted so, the share that are. Recall: of"
    " the class's samples."
)
_CALIBRATION = (
    "Samples in 15 bins by the probability of their prediction; the area of a point follows their"
    " number. Above the line the model is right more often than it claims. The error is the mean"
    " distance to the line (Guo et al. 2017)."
)
