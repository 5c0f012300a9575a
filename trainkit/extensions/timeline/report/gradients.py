"""Gradients of a recording: when each rank had them, their path through the reduction,
and the input of overlap.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from trainkit.extensions.timeline.report.overlap import Profile, ReductionCost, Summing, fit_link
from trainkit.extensions.timeline.report.recorded_facts import Gradient, StepOfRank, by_step
from trainkit.extensions.timeline.traces.horovod_file import Operation
from trainkit.extensions.timeline.traces.merge import RankTrace
from trainkit.extensions.timeline.traces.pieces import SUMMED, About

_GRADIENT = "trainkit.grad."

# (step, name) -> rank -> (handed, done, bytes)
Handed = dict[tuple[int, str], dict[int, tuple[float, float, int]]]


def handed_over(ranks: Sequence[RankTrace]) -> Handed:
    """Return when each rank submitted each gradient, by rank 0's clock;
    only gradients submitted by all ranks.
    """
    submitted: Handed = defaultdict(dict)
    for rank in ranks:
        to_rank_0 = rank.clock.to_rank_0
        sums = [event for event in rank.events if event.get("cat") == SUMMED]
        done = {event["id"]: event["ts"] for event in sums if event["ph"] == "e"}
        for event in sums:
            if event["ph"] != "b" or event["id"] not in done:
                continue
            args = event["args"]
            handed_at = to_rank_0(event["ts"])
            done_at = to_rank_0(done[event["id"]])
            of_gradient = submitted[args["step"], args["names"][0]]
            of_gradient[rank.about.rank] = (handed_at, done_at, args["bytes"])
    return {key: by_rank for key, by_rank in submitted.items() if len(by_rank) == len(ranks)}


def ways(ranks: Sequence[RankTrace], handed: Handed) -> list[Gradient]:
    """Return the path of each gradient, longest first;
    none without a record of Horovod's operations.
    """
    first = ranks[0]
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for operation in first.operations:
        of_several = f"_1of{len(operation.names)}"
        for name in operation.names:
            gradient = name.removeprefix(_GRADIENT).removesuffix(of_several)
            by_name[gradient].append(operation)
    parts_of: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for (_, name), by_rank in handed.items():
        came = [handed_at for handed_at, _, _ in by_rank.values()]
        ready = max(came)
        negotiation = ready - statistics.fmean(came)
        handed_here, done_here, num_bytes = by_rank[first.about.rank]
        for operation in by_name.get(name, ()):
            start = first.clock.to_rank_0(operation.start)
            if handed_here <= start <= done_here:
                parts = (
                    negotiation / 1e6,
                    max(0.0, start - ready) / 1e6,
                    operation.copy_s,
                    operation.wire_s,
                    len(operation.names),
                    num_bytes,
                )
                parts_of[name].append(parts)
                break
    gradients_of_fit = []
    for name, seen in parts_of.items():
        *usual, size = (statistics.median(column) for column in zip(*seen, strict=True))
        gradients_of_fit.append(Gradient(name, round(size), *usual))
    return sorted(gradients_of_fit, key=lambda gradient: -gradient.total_s)


def costs(
    about: About, operations: Sequence[Operation], gradients: Sequence[Gradient]
) -> tuple[Summing, ReductionCost | None]:
    """Return how gradients were collected, and the cost of a reduction if it can be determined."""
    sums = [operation for operation in operations if _is_of_gradients(operation)]
    link = fit_link([(o.num_bytes, o.wire_s) for o in sums if o.wire_s > 0])
    fused = [operation for operation in sums if len(operation.names) > 1]
    copied = sum(operation.num_bytes for operation in fused)
    copy = sum(o.copy_s for o in fused) / copied if copied else 0.0
    cycle = about.cycle_ms / 1000
    # of a gradient with an empty queue before it
    queued = min((gradient.queue_s for gradient in gradients), default=0.0)
    agree = max(0.0, queued - cycle / 2)
    return Summing(cycle, float(about.fusion_bytes), copy, agree), link


def _is_of_gradients(operation: Operation) -> bool:
    if operation.kind != "ALLREDUCE" or not operation.num_bytes:
        return False
    return any(name.startswith(_GRADIENT) for name in operation.names)


def profiles(steps: Sequence[StepOfRank], handed: Handed, about: About) -> list[Profile]:
    """Return each step as a Profile for overlap.py; none without reductions."""
    of_step = by_step(steps)
    ready: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (number, _), by_rank in handed.items():
        if number in of_step:
            begun = statistics.fmean(s.backward_start for s in of_step[number])
            last = max(handed_at for handed_at, _, _ in by_rank.values())
            num_bytes = by_rank[about.rank][2]
            ready[number].append((max(0.0, (last - begun) / 1e6), float(num_bytes)))
    result = []
    for number, gradients in ready.items():
        ranks = of_step[number]
        begun = statistics.fmean(s.backward_start for s in ranks)
        backward = (max(s.backward_end for s in ranks) - begun) / 1e6
        whole = statistics.fmean(s.total_s - s.seconds["communication"] for s in ranks)
        result.append(Profile(tuple(sorted(gradients)), backward, max(0.0, whole - backward)))
    return result
