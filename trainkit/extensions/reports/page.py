"""A report as one self-contained HTML page: it opens without a network, and can be mailed.
The home of plotly.

All pages share one template (page.html.jinja), one stylesheet (page.css), one script (page.js) and
one palette (colors.py). A new page is a call of `write_page`, with charts that begin with `figure`
and colors of the palette: it is dark where the system is, and fits a telephone.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import plotly.offline
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from trainkit.extensions.reports.colors import CARD, DARK, INK, LINE, LINES, SOFT, variables
from trainkit.extensions.reports.grid import Grid
from trainkit.safety.whole_files import replacing
from trainkit.version import __version__

Figure = go.Figure
_HERE = Path(__file__).parent
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
# Characters of a column that a narrow page leaves: of names from code and sentences, of labels.
_LONG, _SHORT = 28, 14
_CLEAR = "rgba(0,0,0,0)"
_AXIS = {
    "automargin": True,
    "gridcolor": LINE,
    "linecolor": LINE,
    "zerolinecolor": LINE,
    "tickcolor": LINE,
    "title": {"standoff": 8},
}
_LOOK = go.layout.Template(
    layout={
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": _FONT, "size": 13, "color": INK},
        "colorway": list(LINES),
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "hoverlabel": {
            "bgcolor": CARD,
            "bordercolor": LINE,
            "font": {"family": _FONT, "color": INK},
        },
        "modebar": {"bgcolor": _CLEAR, "color": SOFT, "activecolor": INK},
        "updatemenudefaults": {"bgcolor": CARD, "bordercolor": LINE, "font": {"color": INK}},
    }
)


@dataclass(frozen=True)
class Picture:
    """A picture (PNG; empty: only the text) with a caption and a line below it."""

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
    empty: str = "There is nothing to show."  # in place of a table or pictures that are empty


def write_page(
    path: Path, title: str, under: str, cards: Sequence[tuple[str, str]], parts: Sequence[Section]
) -> None:
    """Write the page atomically; `under` is the line below the heading,
    `cards` the (name, value) of the headline numbers.

    Raises:
        ValueError: a chart has a color that is not of the palette; names it.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["breakable"] = _breakable
    text = environment.from_string((_HERE / "page.html.jinja").read_text()).render(
        title=title,
        under=under,
        cards=cards,
        parts=[_shown(part) for part in parts],
        light=_own(variables(is_dark=False)),
        dark=_own(variables(is_dark=True)),
        style=_own((_HERE / "page.css").read_text()),
        script=_script(any(part.chart is not None for part in parts)),
        version=__version__,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text)


def figure(x_title: str, y_title: str, height: int = 380) -> go.Figure:
    """Return an empty figure in the page's style."""
    made = go.Figure()
    made.update_layout(
        template=_LOOK,
        height=height,
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
    )
    made.update_xaxes(title_text=x_title)
    made.update_yaxes(title_text=y_title)
    return made


def _shown(part: Section) -> dict[str, object]:
    has_rows = part.grid is not None and bool(part.grid.rows)
    has_more = part.sentences or part.chart is not None or part.pictures
    return {
        **vars(part),
        "chart": None if part.chart is None else _json(part.chart),
        "height": None if part.chart is None else part.chart.layout.height,
        "widths": [] if part.grid is None else _widths(part.grid),
        "is_empty": not has_rows and (part.grid is not None or not has_more),
    }


def _json(chart: go.Figure) -> Markup:
    text = str(chart.to_json())
    if unknown := {*re.findall(r'"(#[0-9a-fA-F]{3,8})"', text)} - {*DARK}:
        raise ValueError(
            f"A chart has {', '.join(sorted(unknown))}; its colors must be of"
            " trainkit.extensions.reports.colors, which has each for light and dark pages."
        )
    return _own(text.replace("<", "\\u003c"))  # a name in the data may hold "</script>"


def _script(has_charts: bool) -> Markup:
    library = plotly.offline.get_plotlyjs() if has_charts else ""
    own = f"const DARK = {json.dumps(DARK)};\n{(_HERE / 'page.js').read_text()}"
    return _own(f"<script>{library}</script>\n<script>\n{own}</script>")


def _widths(grid: Grid) -> list[int]:
    """Return the characters that each column is wide at least, for columns of text."""
    columns = zip(grid.columns, *grid.rows, strict=True)
    return [
        min(_LONG if grid.is_code or i else _SHORT, max(map(len, cells)))
        for i, cells in enumerate(columns)
    ]


def _breakable(text: str) -> Markup:
    """Return text in which a line may break at spaces, and behind the dots and slashes of a name,
    but not within the parts of a name.
    """
    parts = re.split(r"(?<=[./=])(?=[A-Za-z_*])|(?<= )|(?<=\d-)(?=[a-z_]+=)", text)
    return Markup("").join(_part(part) for part in parts)


def _part(part: str) -> Markup:
    end = Markup("") if part.endswith(" ") else Markup("<wbr>")
    if "-" not in part or len(part) > _LONG:
        return escape(part) + end
    return Markup('<span class="name">{}</span>{}').format(part, end)


def _own(text: str) -> Markup:
    return Markup(text)  # noqa: S704 - of our files and of plotly's, escaped by them
