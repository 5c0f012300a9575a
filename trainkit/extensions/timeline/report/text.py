"""A recording as sentences and tables, for the terminal and the top of the page."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.console import plural
from trainkit.extensions.reports.grid import Grid, human, ms, share
from trainkit.extensions.timeline.report.advice import Advice
from trainkit.extensions.timeline.report.recorded_facts import LABELS, OUTLIER, Outlier, of_steps
from trainkit.extensions.timeline.report.steps import Analysis

_SHOWN = 12  # gradients in the terminal
_WORK = {
    "data": "waits for its loader",
    "forward": "computes forward",
    "backward": "computes backward",
    "optimizer": "updates its weights",
    "hooks": "is in callbacks between steps",
    "communication": "is in reductions",
}


def in_words(analysis: Analysis) -> list[str]:
    """Return the findings as sentences, most important first."""
    numbers = analysis.numbers
    step = analysis.step_s
    ranks = plural(len(analysis.abouts), "rank")
    which = f"Steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"Step {numbers[0]}"
    said = [
        f"{which} on {ranks} ({analysis.abouts[0].engine}, {analysis.abouts[0].device}): {ms(step)}"
        f" a step, {analysis.samples_per_s:,.0f} samples/s; all figures are medians over the steps."
    ]
    if outliers := analysis.outliers:
        said.append(_outlier_words(analysis, outliers))
    if (left_out := numbers[-1] - numbers[0] + 1 - len(numbers)) > 0:
        said.append(
            f"{left_out} of them are left out: a rank had no samples in them, or did not finish"
            " them."
        )
    said.append(_largest_words(analysis))
    if analysis.abouts[0].world_size == 1:
        return said
    said.append(_slow_words(analysis))
    if analysis.link is not None:
        link = analysis.link
        cost = f"{ms(link.latency_s)} and {1000 * 2**20 / link.bytes_per_s:.3g} ms a MiB"
        said.append(
            f"A reduction over ranks costs {cost} ({link.bytes_per_s / 1e9:.3g} GB/s), fitted to"
            " the recording."
        )
    world = analysis.abouts[0].world_size
    if len(analysis.abouts) < world:
        there = ", ".join(str(about.rank) for about in analysis.abouts)
        said.append(
            f"Of {world} ranks only the files of {there} are present: copy the others' into the"
            " same folder."
        )
    if analysis.unaligned:
        ranks = ", ".join(map(str, analysis.unaligned))
        said.append(
            f"The clocks of ranks {ranks} could not be compared: in the trace their times come from"
            " the time of day."
        )
    if analysis.link is None and analysis.has_operations:
        said.append(
            "The reductions are too similar in size to determine the network's cost, so there is no"
            " prediction for them."
        )
    if world > 1 and not analysis.gradients:
        said.append(f"There are no facts about single gradients: {_no_gradients(analysis)}.")
    return said


def _largest_words(analysis: Analysis) -> str:
    medians = {part: analysis.median(part) for part in LABELS}
    step = analysis.step_s
    largest = max(medians, key=medians.__getitem__)
    covered = sum(medians.values())
    shown = [
        f"{analysis.labels[part]} {share(medians[part], step)}"
        for part in ("data", "communication", "waiting")
        if part in analysis.labels
    ]
    if step - covered <= medians[largest]:
        return (
            f"Most of it is {LABELS[largest]} ({share(medians[largest], step)});"
            f" {', '.join(shown)}."
        )
    sums = {part: sum(own.seconds[part] for own in analysis.steps) for part in LABELS}
    most = max(sums, key=sums.__getitem__)
    return (
        f"No part is long in most steps: the parts' medians add up to {share(covered, step)} of a "
        "step, which stalls in one part or another make long. Of the time of all steps "
        f"{LABELS[most]} has most ({share(sums[most], sum(sums.values()))})."
    )


def _outlier_words(analysis: Analysis, outliers: Sequence[Outlier]) -> str:
    longest = outliers[0]
    count = len(outliers)
    text = (
        f"{longest.total_s / analysis.step_s:.0f} times the median: rank {longest.rank}"
        f" {_WORK[longest.part]} for "
    )
    text += f"{ms(longest.part_s)}."
    if count == 1:
        return f"Step {longest.step} took {ms(longest.total_s)}, {text}"
    total = sum(of_steps(analysis.steps, lambda step: step.total_s).values())
    lost = share(sum(outlier.total_s for outlier in outliers), total)
    return (
        f"{count} of {len(analysis.numbers)} steps took more than {OUTLIER:g} times the median, and"
        f" {lost} of the time; the longest, step {longest.step}, {ms(longest.total_s)}, {text}"
    )


def _no_gradients(analysis: Analysis) -> str:
    if analysis.abouts[0].engine != "horovod":
        return "only Horovod records when each is reduced"
    if analysis.has_operations:
        return "their submission was not recorded"
    return "there is no record of Horovod's operations"


def _slow_words(analysis: Analysis) -> str:
    slow = analysis.slow
    if len(analysis.abouts) < 2:
        return "A single rank waits for no other."
    if analysis.unaligned:
        return "The slowest rank cannot be determined: the ranks' clocks could not be compared."
    if slow is None:
        return "No rank is slower than the others in most steps."
    counted, of = slow.steps
    rank_shares = analysis.abouts[0].rank_shares
    shares = f" Samples are split {rank_shares}." if rank_shares != "even" else ""
    return (
        f"Rank {slow.rank} on {slow.host} is the slowest since step {slow.since}: in {counted} of"
        f" {of} steps the last, by {ms(slow.behind_s)}; it {_WORK[slow.part]} for"
        f" {ms(slow.part_s)}, the others for {ms(slow.usual_s)}.{shares}"
    )


def grids(analysis: Analysis, advice: Sequence[Advice], gradients: int = _SHOWN) -> list[Grid]:
    """Return the tables: parts, gradients, advice."""
    return [
        parts_grid(analysis),
        *([gradients_grid(analysis, gradients)] if analysis.gradients else []),
        advice_grid(advice),
    ]


def parts_grid(analysis: Analysis) -> Grid:
    """Return the parts of a step, per rank (of many ranks, the first four and the slowest)."""
    ranks = [about.rank for about in analysis.abouts]
    shown = ranks if len(ranks) <= 5 else ranks[:4]
    if analysis.slow is not None and analysis.slow.rank not in shown:
        shown = [*shown, analysis.slow.rank]
    rows = []
    for part, label in analysis.labels.items():
        usual = analysis.median(part)
        own = [analysis.median(part, rank) for rank in shown] if len(ranks) > 1 else []
        rows.append(
            (label, ms(usual), share(usual, analysis.step_s), *(ms(value) for value in own))
        )
    rows.append(("a step", ms(analysis.step_s), "100 %", *("" for _ in shown if len(ranks) > 1)))
    each = [f"rank {rank}" for rank in shown] if len(ranks) > 1 else []
    return Grid("Parts of a step", ("part", "median", "share", *each), rows)


def gradients_grid(analysis: Analysis, shown: int) -> Grid:
    """Return the gradients with the longest paths."""
    rows = [
        (
            g.name,
            human(g.num_bytes),
            ms(g.negotiation_s),
            ms(g.queue_s),
            ms(g.fusion_s),
            ms(g.allreduce_s),
            f"{g.fused_with:.0f}",
        )
        for g in analysis.gradients[:shown]
    ]
    more = f", {shown} of {len(analysis.gradients)}" if len(analysis.gradients) > shown else ""
    title = (
        f"Gradients with the longest path{more}: until all ranks have it, in the queue, in copies,"
        " in the allreduce"
    )
    return Grid(
        title,
        ("gradient", "size", "negotiation", "queue", "fusion", "allreduce", "fused"),
        rows,
        is_code=True,
    )


def advice_grid(advice: Sequence[Advice]) -> Grid:
    """Return the advice as a table."""
    rows = [(a.setting, f"{'up to ' * a.is_bound}{100 * a.gain:.0f} %", a.why) for a in advice]
    title = "What to try, with the predicted gain in samples per second"
    return Grid(
        title,
        ("try", "gain", "since"),
        rows or [("nothing", "", "no setting known here gains 1 %")],
        sentences=(2,),
        is_code=True,
    )
