"""Draws the curves of slow_link, of results.json, as docs/communication.svg: validation loss over
seconds of training.

python -m benchmarks.curves
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.everything import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "communication.svg"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 60, 20, 20, 50
COLOURS = ("#000000", "#0072b2", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#999999")


def draw(rows: list[list[float | str]]) -> str:
    """Return an SVG of rows (name, step, seconds, loss);
    a name's curve begins again where its steps do.
    """
    curves: list[tuple[str, list[tuple[float, float]]]] = []
    step = 0.0
    for name, at, seconds, loss in rows:
        if not curves or curves[-1][0] != name or float(at) < step:
            curves.append((str(name), []))
        curves[-1][1].append((float(seconds), float(loss)))
        step = float(at)
    points = [point for _, curve in curves for point in curve]
    longest = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        right = LEFT + x / longest * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{right:.1f},{down:.1f}"

    drawn = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for tick in range(5):
        x, y = longest * tick / 4, low + (high - low) * tick / 4
        across, down = place(x, y).split(",")
        drawn.append(
            f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.0f}</text>'
        )
        drawn.append(f'<text x="{LEFT - 6}" y="{down}" text-anchor="end">{y:.2f}</text>')
    drawn.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">seconds of training</text>'
    )
    drawn.append(f'<text x="{LEFT}" y="14">validation loss</text>')
    for i, (name, curve) in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(place(*point) for point in curve)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(
            f'<text x="{WIDTH - RIGHT}" y="{TOP + 14 + 15 * i}" text-anchor="end"'
            f' fill="{colour}">{name}</text>'
        )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
        f' font-size="11">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PAGE.write_text(draw(json.loads(RESULTS.read_text())["slow_link"]["tables"][1]["rows"]))
