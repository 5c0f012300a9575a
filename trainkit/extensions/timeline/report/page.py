"""The page of a recording: its charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from trainkit.extensions.reports.colors import (
    AMBER,
    BLUE,
    CARD,
    GREEN,
    GREY,
    INK,
    LILAC,
    MAROON,
    MIST,
    PALE,
    RED,
    SKY,
)
from trainkit.extensions.reports.grid import ms, share
from trainkit.extensions.reports.page import Section, figure, write_page
from trainkit.extensions.timeline.report.advice import Advice
from trainkit.extensions.timeline.report.recorded_facts import LABELS, StepOfRank
from trainkit.extensions.timeline.report.steps import Analysis
from trainkit.extensions.timeline.report.text import (
    advice_grid,
    gradients_grid,
    in_words,
    parts_grid,
)
from trainkit.extensions.timeline.traces.merge import RankTrace

COLORS = {
    "data": AMBER,
    "forward": SKY,
    "backward": BLUE,
    "waiting": LILAC,
    "communication": RED,
    "optimizer": GREEN,
    "hooks": GREY,
    "validation": PALE,
    "epoch end": MIST,
}
_WAYS = {"negotiation": LILAC, "queue": AMBER, "fusion": SKY, "allreduce": RED}
_RANKS, _GRADIENTS = 8, 20  # shown in a chart at most


def write_timeline_page(
    path: Path, of: str, ranks: Sequence[RankTrace], analysis: Analysis, advice: Sequence[Advice]
) -> None:
    """Write the page of a recording; `of` names the recording."""
    step = analysis.step_s
    cards = [
        ("a step", ms(step)),
        ("samples a second", f"{analysis.samples_per_s:,.0f}"),
        *(
            (label, share(analysis.median(part), step))
            for part, label in analysis.labels.items()
            if part in ("data", "communication")
        ),
        *(("longest step", ms(outlier.total_s)) for outlier in analysis.outliers[:1]),
    ]
    is_alone = analysis.abouts[0].world_size == 1
    if not is_alone:
        slow = analysis.slow
        cards.append(("slowest rank", "none" if slow is None else f"rank {slow.rank}"))
    parts = [
        Section("In words", tuple(in_words(analysis)), id="words"),
        Section("What to try", grid=advice_grid(advice), note=_MODEL[is_alone], id="advice"),
        Section(
            "Parts of a step",
            chart=_usual_parts(analysis),
            grid=parts_grid(analysis),
            note=_PARTS if is_alone else f"{_SHARED} {_PARTS}",
            id="parts",
        ),
        Section("Step by step", chart=_each_step(analysis), id="steps"),
        Section(_ONE_STEP[is_alone], chart=_one_step(ranks, analysis), note=_ONE, id="step"),
    ]
    if len(analysis.abouts) > 1:
        parts.append(Section("Lateness by rank", chart=_lateness(analysis), note=_LATE, id="late"))
    if analysis.gradients:
        grid = gradients_grid(analysis, _GRADIENTS)
        parts.append(
            Section(
                "The path of gradients", chart=_ways(analysis), grid=grid, note=_WAY, id="gradients"
            )
        )
    if analysis.link is not None:
        parts.append(
            Section("Cost of a reduction", chart=_costs(ranks[0], analysis), note=_COST, id="sums")
        )
    write_page(path, "Timeline", of, cards, parts)


def _shown_ranks(analysis: Analysis) -> list[int]:
    ranks = [about.rank for about in analysis.abouts][:_RANKS]
    return (
        ranks
        if analysis.slow is None or analysis.slow.rank in ranks
        else [*ranks[:-1], analysis.slow.rank]
    )


def _usual_parts(analysis: Analysis) -> go.Figure:
    ranks = _shown_ranks(analysis)
    chart = figure("ms, median of a step", "", height=230 + 34 * len(ranks))
    for part, label in analysis.labels.items():
        usual = [1000 * analysis.median(part, rank) for rank in ranks]
        names = [f"rank {rank}" for rank in ranks]
        chart.add_bar(
            x=usual,
            y=names,
            orientation="h",
            name=label,
            marker_color=COLORS[part],
            hovertemplate="%{x:.2f} ms",
        )
    chart.update_layout(barmode="stack")
    chart.update_yaxes(autorange="reversed")
    return chart


def _each_step(analysis: Analysis) -> go.Figure:
    ranks = _shown_ranks(analysis)
    chart = figure("step", "ms")
    for i, rank in enumerate(ranks):
        own = sorted((s for s in analysis.steps if s.rank == rank), key=lambda s: s.step)
        for part, label in analysis.labels.items():
            values = [1000 * step.seconds[part] for step in own]
            chart.add_bar(
                x=[step.step for step in own],
                y=values,
                name=label,
                marker_color=COLORS[part],
                visible=i == 0,
            )
    chart.update_layout(barmode="stack")
    if len(ranks) > 1:
        buttons = [
            {
                "label": f"rank {rank}",
                "method": "update",
                "args": [{"visible": [r == rank for r in ranks for _ in analysis.labels]}],
            }
            for rank in ranks
        ]
        place = {"x": 1, "xanchor": "right", "y": 0, "pad": {"t": 28}, "direction": "up"}
        menu = {"buttons": buttons, **place}
        chart.update_layout(updatemenus=[menu], height=420)
    return chart


def _one_step(ranks: Sequence[RankTrace], analysis: Analysis) -> go.Figure:
    """Draw the step of median length: parts of each rank, and below them Horovod's operations."""
    first = [step for step in analysis.steps if step.rank == analysis.abouts[0].rank]
    median = sorted(first, key=lambda step: step.total_s)[len(first) // 2]
    same = {step.rank: step for step in analysis.steps if step.step == median.step}
    shown = [rank for rank in ranks if rank.about.rank in _shown_ranks(analysis)]
    begin = min(same[rank.about.rank].start for rank in shown)
    chart = figure(f"ms since step {median.step} began", "", height=200 + 56 * len(shown))
    for part in (*analysis.labels, "validation", "epoch end"):
        if bars := [
            bar for rank in shown for bar in _bars(rank, same[rank.about.rank], part, begin)
        ]:
            label = {"communication": "exposed communication and waiting"}.get(
                part, LABELS.get(part, part)
            )
            _add_bars(chart, bars, label, COLORS[part])
    if sums := [bar for rank in shown for bar in _sum_bars(rank, same[rank.about.rank], begin)]:
        _add_bars(chart, sums, "Horovod: operations", MAROON)
    chart.update_layout(barmode="overlay")
    chart.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=_tracks(shown))
    return chart


_Bar = tuple[str, float, float, str]  # track, begin, length (ms), what it is


def _tracks(shown: Sequence[RankTrace]) -> list[str]:
    return [
        name
        for r in shown
        for name in (
            f"rank {r.about.rank}",
            *([f"rank {r.about.rank}, Horovod"] if r.operations else []),
        )
    ]


def _bars(rank: RankTrace, step: StepOfRank, part: str, begin: float) -> list[_Bar]:
    events = [
        e
        for e in rank.events
        if e.get("cat") == "part" and e.get("args", {}).get("step") == step.step
    ]
    track = max(event["tid"] for event in events)
    return [
        (
            f"rank {rank.about.rank}",
            (rank.clock.to_rank_0(e["ts"]) - begin) / 1000,
            e["dur"] / 1000,
            part,
        )
        for e in events
        if e["tid"] == track and e["name"] == part
    ]


def _sum_bars(rank: RankTrace, step: StepOfRank, begin: float) -> list[_Bar]:
    end = step.start + step.total_s * 1e6
    return [
        (
            f"rank {rank.about.rank}, Horovod",
            (at - begin) / 1000,
            (operation.end - operation.start) / 1000,
            (
                f"{operation.kind.lower()} of {len(operation.names)} tensors,"
                f" {operation.num_bytes / 2**20:.2f} MiB"
            ),
        )
        for operation in rank.operations
        if step.start <= (at := rank.clock.to_rank_0(operation.start)) < end
    ]


def _add_bars(chart: go.Figure, bars: Sequence[_Bar], label: str, color: str) -> None:
    tracks, begins, lengths, labels = zip(*bars, strict=True)
    chart.add_bar(
        y=tracks,
        base=begins,
        x=lengths,
        orientation="h",
        name=label,
        marker={"color": color, "line": {"width": 0.5, "color": CARD}},
        customdata=labels,
        hovertemplate="%{customdata}: %{x:.2f} ms<extra>%{y}</extra>",
    )


def _lateness(analysis: Analysis) -> go.Figure:
    chart = figure("step", "ms after the first rank", height=300)
    earliest: dict[int, float] = {}
    for step in analysis.steps:
        earliest[step.step] = min(earliest.get(step.step, step.backward_end), step.backward_end)
    for rank in _shown_ranks(analysis):
        own = sorted((s for s in analysis.steps if s.rank == rank), key=lambda s: s.step)
        late = [(step.backward_end - earliest[step.step]) / 1000 for step in own]
        chart.add_scatter(
            x=[step.step for step in own], y=late, name=f"rank {rank}", mode="lines+markers"
        )
    return chart


def _ways(analysis: Analysis) -> go.Figure:
    shown = analysis.gradients[:_GRADIENTS]
    chart = figure("ms, median of a step", "", height=120 + 20 * len(shown))
    for way, color in _WAYS.items():
        values = [1000 * getattr(gradient, f"{way}_s") for gradient in shown]
        chart.add_bar(
            x=values, y=[g.name for g in shown], orientation="h", name=way, marker_color=color
        )
    chart.update_layout(barmode="stack")
    chart.update_yaxes(autorange="reversed", tickfont={"size": 11})
    return chart


def _costs(first: RankTrace, analysis: Analysis) -> go.Figure:
    assert analysis.link is not None
    sums = [o for o in first.operations if o.kind == "ALLREDUCE" and o.num_bytes and o.wire_s > 0]
    sizes = [operation.num_bytes / 2**20 for operation in sums]
    chart = figure("MiB in one allreduce", "ms", height=320)
    chart.add_scatter(
        x=sizes,
        y=[1000 * o.wire_s for o in sums],
        mode="markers",
        name="recorded",
        marker_color=RED,
    )
    ends = [min(sizes), max(sizes)]
    line = [1000 * analysis.link.seconds(mib * 2**20) for mib in ends]
    chart.add_scatter(
        x=ends, y=line, mode="lines", name="latency + size / bandwidth", line_color=INK
    )
    return chart


_ONE_STEP = {True: "One step", False: "One step, from all ranks"}
_SHARED = (
    "Waiting is the time from the end of a rank's own backward to the end of the slowest rank's;"
    " exposed communication is the rest of the reductions."
)
_PARTS = (
    "On a GPU the parts are by the device's clock. Each figure is a median over the steps, so the"
    " parts need not sum to the step."
)
_ONE = (
    "Drag to zoom in, double click to zoom out. Open the recording's trace.json.gz in"
    " ui.perfetto.dev for all steps."
)
_LATE = (
    "When each rank ended its backward, after the rank that ended first: the others wait for the"
    " highest."
)
_WAY = (
    "Negotiation: from the time a rank has it until all ranks have. Queue: until Horovod's thread"
    " takes it. Fusion: copies into the buffer and out of it. Allreduce: the collective, of all"
    " tensors in the buffer."
)
_COST = (
    "Fitted by the median of slopes between pairs (Theil 1950, Sen 1968): delayed reductions do not"
    " tilt it."
)
_MODEL = {
    True: "'up to' is a bound. Measure before you believe.",
    False: (
        "Gains for reductions come from a model that runs Horovod's cycles over the recorded"
        " gradients with another setting; 'up to' is a bound. Measure before you believe."
    ),
}
