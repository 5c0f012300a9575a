"""A report as one self-contained HTML page: it opens without a network, and can be mailed.
The home of plotly.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import plotly.offline
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trainkit.report.grid import Grid
from trainkit.safety.whole_files import replacing
from trainkit.version import __version__

Figure = go.Figure
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Picture:
    """A picture (PNG; empty: only the words) with a caption and a line below it."""

    png: bytes
    caption: str
    under: str = ""

    @property
    def source(self) -> str:
        """The picture as a URL that holds it."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}" if self.png else ""


@dataclass(frozen=True)
class Section:
    """A part of a page, from top to bottom: title, sentences, chart, table, pictures, note."""

    title: str
    sentences: tuple[str, ...] = ()  # paragraphs
    chart: go.Figure | None = None
    grid: Grid | None = None
    note: str = ""  # explanation, or source
    id: str = ""  # its id, for links
    pictures: Sequence[Picture] = ()


def write_page(
    path: Path, title: str, under: str, cards: Sequence[tuple[str, str]], parts: Sequence[Section]
) -> None:
    """Write the page atomically; `under` is the line below the heading,
    `cards` the (name, value) of the headline numbers.
    """
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        _TEMPLATE.read_text()
    )
    shown = [
        {
            **vars(part),
            "chart": None if part.chart is None else _html(part.chart, part.id or f"chart-{i}"),
        }
        for i, part in enumerate(parts)
    ]
    library = Markup(f"<script>{plotly.offline.get_plotlyjs()}</script>")  # noqa: S704 - plotly's own code
    text = template.render(
        title=title, under=under, cards=cards, parts=shown, library=library, version=__version__
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text)


def _html(figure: go.Figure, name: str) -> Markup:
    config = {
        "displaylogo": False,
        "responsive": True,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }
    made = figure.to_html(
        include_plotlyjs=False, full_html=False, div_id=f"{name}-plot", config=config
    )
    return Markup(made)  # noqa: S704 - plotly escapes its input


def figure(x_title: str, y_title: str, height: int = 380) -> go.Figure:
    """Return an empty figure in the page's style."""
    made = go.Figure()
    made.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        font={"family": _FONT, "size": 13, "color": "#1d2733"},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
        hoverlabel={"font": {"family": _FONT}},
    )
    made.update_xaxes(title=x_title, automargin=True)
    made.update_yaxes(title=y_title, automargin=True)
    return made
