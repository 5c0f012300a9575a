"""The colors of pages: each has a name, a value on a light page and one on a dark page.

Charts are written in the light ones; the page's script (page.js) replaces them by the dark ones
where the system asks for a dark page. Text in INK, SOFT, BLUE, RED or GREEN has a contrast of at
least 4.5:1 on CARD and on BACK in both (WCAG 2.2, 1.4.3).
"""

from __future__ import annotations

INK = "#1d2733"
SOFT = "#566475"
LINE = "#dde3ea"
FAINT = "#eef1f4"
BACK = "#f6f8fa"
CARD = "#ffffff"
BLUE = "#2f6fb3"
RED = "#c43d50"
GREEN = "#2b7d52"
AMBER = "#e0a100"
VIOLET = "#8a63b8"
SKY = "#7fb3e6"
ORANGE = "#c97b3d"
GREY = "#9aa5b1"
TEAL = "#5aa9a3"
LILAC = "#c7b0e0"
PALE = "#cfd6dd"
MIST = "#b5bec8"
MAROON = "#8c2f39"
HEAT = "#7db1e4"  # the largest value of a heat map, below text in INK

DARK = {
    INK: "#e4eaf1",
    SOFT: "#a3b1c0",
    LINE: "#344150",
    FAINT: "#25303c",
    BACK: "#0f141a",
    CARD: "#182029",
    BLUE: "#6aa9e6",
    RED: "#f07c8b",
    GREEN: "#5cbd8b",
    AMBER: "#e8b53f",
    VIOLET: "#b496dd",
    SKY: "#a5d0f7",
    ORANGE: "#e09a5f",
    GREY: "#7e8b99",
    TEAL: "#63bdb6",
    LILAC: "#8d78b0",
    PALE: "#4b5867",
    MIST: "#66737f",
    MAROON: "#d9a0a7",
    HEAT: "#285f9b",
}
LINES = (BLUE, RED, GREEN, AMBER, VIOLET, INK, SKY, ORANGE, GREY, TEAL)  # of a chart, in order

_VARIABLES = {"ink": INK, "soft": SOFT, "line": LINE, "faint": FAINT, "back": BACK, "card": CARD}


def variables(is_dark: bool) -> str:
    """Return the colors of a page as CSS variables."""
    return " ".join(
        f"--{name}: {DARK[color] if is_dark else color};" for name, color in _VARIABLES.items()
    )
