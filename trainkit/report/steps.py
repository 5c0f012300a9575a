"""What a recording says, in numbers: the parts of each step on each rank, each gradient's way, and the slowest rank.

Ranks wait for each other where gradients are summed. The time between the end of a rank's own backward and its sums is
therefore two things: `waiting`, until the last rank has ended its backward, and `communication`, what is left then: the
sums that no backward hid. On a GPU the parts are those of the device, else those of the host.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.report.overlap import Link, Profile, Summing, fit_link
from trainkit.tracing.horovod_file import Operation
from trainkit.tracing.merge import RankTrace, TraceError
from trainkit.tracing.pieces import SUMMED, About, Event

LABELS = {
    "data": "data wait",
    "forward": "forward",
    "backward": "backward",
    "waiting": "waiting for a slower rank",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "hooks": "hooks, between steps",
}
OWN_WORK = ("data", "forward", "backward", "optimizer", "hooks")
_GRADIENT = "trainkit.grad."
_LEAST_S, _LEAST_SHARE, _MOST_OF, _LEAST_STEPS, _ERRORS = 0.002, 0.03, 0.8, 5, 5.0


@dataclass(frozen=True)
class StepOfRank:
    """A step on a rank. Times are microseconds of rank 0's clock.

    Attributes:
        step: its number, as `global_step` before it.
        rank: whose.
        start: when it began.
        seconds: by part, see LABELS; a validation is left out.
        backward_start: of the last microbatch.
        backward_end: of the last microbatch.
        samples: of all ranks.
    """

    step: int
    rank: int
    start: float
    seconds: dict[str, float]
    backward_start: float
    backward_end: float
    samples: int

    @property
    def total_s(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Gradient:
    """The way of a gradient (or of a bucket of them) through its sum: means over steps, in seconds.

    Attributes:
        name: of the parameter.
        num_bytes: that a rank contributes.
        negotiation_s: from the moment at which a rank has it until all have.
        queue_s: from then until its operation begins: Horovod's cycle, and operations before it.
        fusion_s: in copies into the fusion buffer and out of it.
        allreduce_s: in the collective, of all that was fused with it.
        fused_with: tensors in its operation, itself included.
    """

    name: str
    num_bytes: int
    negotiation_s: float
    queue_s: float
    fusion_s: float
    allreduce_s: float
    fused_with: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.negotiation_s + self.queue_s + self.fusion_s + self.allreduce_s


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for.

    Attributes:
        rank: which.
        host: its host.
        since: the first step from which on it is.
        steps: in how many steps it was the last, of how many since then.
        behind_s: by how much, in the mean of these.
        part: of OWN_WORK, the one that makes the difference.
        part_s: of that part on this rank.
        usual_s: of that part on the others.
    """

    rank: int
    host: str
    since: int
    steps: tuple[int, int]
    behind_s: float
    part: str
    part_s: float
    usual_s: float


@dataclass(frozen=True)
class Analysis:
    """All that is known of a recording.

    Attributes:
        abouts: of the ranks that are there.
        steps: of all ranks.
        gradients: the longest way first; empty where Horovod's timeline is missing.
        slow: the rank that the others wait for, or None.
        link: what a sum costs here, or None where that cannot be told.
        summing: how gradients were taken.
        profiles: the steps as overlap.py sees them; empty where there are no sums.
        unaligned: ranks whose clocks could not be compared.
        has_operations: whether there is a record of Horovod's operations.
    """

    abouts: list[About]
    steps: list[StepOfRank]
    gradients: list[Gradient]
    slow: SlowRank | None
    link: Link | None
    summing: Summing
    profiles: list[Profile]
    unaligned: list[int]
    has_operations: bool = False

    @property
    def numbers(self) -> list[int]:
        """The steps that were recorded."""
        return sorted({step.step for step in self.steps})

    @property
    def step_s(self) -> float:
        """The mean seconds of a step, of the rank at which it takes longest."""
        return sum(self.mean(part) for part in LABELS)

    def mean(self, part: str) -> float:
        """Return the mean seconds of a part, over steps and ranks."""
        return statistics.fmean(step.seconds[part] for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        taken = sum(step.samples for step in self.steps if step.rank == self.abouts[0].rank)
        return taken / max(1e-9, sum(s.total_s for s in self.steps if s.rank == self.abouts[0].rank))


def analyse(ranks: Sequence[RankTrace]) -> Analysis:
    """Work it out.

    Raises:
        TraceError: no step was recorded as a whole.
    """
    steps = [step for rank in ranks for step in _steps(rank)]
    everywhere = set.intersection(*({s.step for s in steps if s.rank == rank.about.rank} for rank in ranks))
    steps = [step for step in steps if step.step in everywhere]
    are_aligned = all(rank.is_aligned for rank in ranks)
    if are_aligned:  # else nobody can tell waiting for another rank from waiting for the sums
        steps = _split_waiting(steps)
    if not steps:
        raise TraceError("The recording has no step that all ranks ended: it was cut off too early. Record again.")
    handed = _handed(ranks)
    operations = ranks[0].operations
    gradients = _gradients(ranks, handed)
    summing, link = _costs(ranks[0].about, operations, gradients)
    profiles = _profiles(steps, handed, ranks[0].about)
    return Analysis(
        abouts=[rank.about for rank in ranks],
        steps=steps,
        gradients=gradients,
        slow=_slow(steps, ranks) if are_aligned else None,
        link=link,
        summing=summing,
        profiles=profiles,
        unaligned=[rank.about.rank for rank in ranks if not rank.is_aligned],
        has_operations=bool(operations),
    )


def _steps(rank: RankTrace) -> list[StepOfRank]:
    parts = [e for e in rank.events if e.get("cat") == "part" and "step" in e.get("args", {})]
    track = 1 if any(event["tid"] == 1 for event in parts) else 0
    samples = {e["args"]["step"]: e["args"]["samples"] for e in parts if "samples" in e["args"]}
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in parts:
        if event["tid"] == track and "samples" not in event["args"]:
            by_step[event["args"]["step"]].append(event)
    found = []
    for number, events in by_step.items():
        backwards = [e for e in events if e["name"] == "backward"]
        if number not in samples or not backwards:  # cut off, or a rank without a sample
            continue
        seconds = {part: sum(e["dur"] for e in events if e["name"] == part) / 1e6 for part in LABELS}
        begun, ended = backwards[-1]["ts"], backwards[-1]["ts"] + backwards[-1]["dur"]
        at = [rank.clock.to_rank_0(us) for us in (events[0]["ts"], begun, ended)]
        found.append(StepOfRank(number, rank.about.rank, at[0], seconds, at[1], at[2], samples[number]))
    return found


def _split_waiting(steps: list[StepOfRank]) -> list[StepOfRank]:
    last: dict[int, float] = defaultdict(float)
    for step in steps:
        last[step.step] = max(last[step.step], step.backward_end)
    for step in steps:
        waited = min(step.seconds["communication"], (last[step.step] - step.backward_end) / 1e6)
        step.seconds["waiting"] = waited
        step.seconds["communication"] -= waited
    return steps


_Handed = dict[tuple[int, str], dict[int, tuple[float, float, int]]]  # (step, name) -> rank -> (handed, done, bytes)


def _handed(ranks: Iterable[RankTrace]) -> _Handed:
    found: _Handed = defaultdict(dict)
    for rank in ranks:
        done = {e["id"]: e["ts"] for e in rank.events if e.get("cat") == SUMMED and e["ph"] == "e"}
        for event in rank.events:
            if event.get("cat") == SUMMED and event["ph"] == "b" and event["id"] in done:
                times = rank.clock.to_rank_0(event["ts"]), rank.clock.to_rank_0(done[event["id"]])
                found[event["args"]["step"], event["args"]["names"][0]][rank.about.rank] = *times, event["args"]["bytes"]
    return {key: by_rank for key, by_rank in found.items() if len(by_rank) == len(list(ranks))}


def _gradients(ranks: Sequence[RankTrace], handed: _Handed) -> list[Gradient]:
    first = ranks[0]
    by_name: dict[str, list[Operation]] = defaultdict(list)
    for operation in first.operations:
        for name in operation.names:
            by_name[name.removeprefix(_GRADIENT).removesuffix(f"_1of{len(operation.names)}")].append(operation)
    ways: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for (_, name), by_rank in handed.items():
        came = [handed_at for handed_at, _, _ in by_rank.values()]
        ready, done = max(came), by_rank[first.about.rank][1]
        for operation in by_name.get(name, ()):
            start = first.clock.to_rank_0(operation.start)
            if by_rank[first.about.rank][0] <= start <= done:
                negotiation = ready - statistics.fmean(came)
                parts = negotiation / 1e6, max(0.0, start - ready) / 1e6, operation.seconds_in("MEMCPY"), operation.wire_s
                ways[name].append((*parts, len(operation.names), by_rank[first.about.rank][2]))
                break
    found = []
    for name, seen in ways.items():
        *means, size = (statistics.fmean(column) for column in zip(*seen, strict=True))
        found.append(Gradient(name, round(size), *means))
    return sorted(found, key=lambda gradient: -gradient.total_s)


def _costs(about: About, operations: Sequence[Operation], gradients: Sequence[Gradient]) -> tuple[Summing, Link | None]:
    sums = [o for o in operations if o.kind == "ALLREDUCE" and o.num_bytes and any(n.startswith(_GRADIENT) for n in o.names)]
    link = fit_link([(o.num_bytes, o.wire_s) for o in sums if o.wire_s > 0])
    fused = [o for o in sums if len(o.names) > 1]
    copied = sum(o.num_bytes for o in fused)
    copy = sum(o.seconds_in("MEMCPY") for o in fused) / copied if copied else 0.0
    cycle = about.cycle_ms / 1000
    queued = min((gradient.queue_s for gradient in gradients), default=0.0)  # of one before which nothing stood
    return Summing(cycle, float(about.fusion_bytes), copy, max(0.0, queued - cycle / 2)), link


def _profiles(steps: Sequence[StepOfRank], handed: _Handed, about: About) -> list[Profile]:
    of_step: dict[int, list[StepOfRank]] = defaultdict(list)
    for step in steps:
        of_step[step.step].append(step)
    ready: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (number, _), by_rank in handed.items():
        if number in of_step:
            begun = statistics.fmean(s.backward_start for s in of_step[number])
            at = (max(handed_at for handed_at, _, _ in by_rank.values()) - begun) / 1e6
            ready[number].append((max(0.0, at), float(by_rank[about.rank][2])))
    found = []
    for number, gradients in ready.items():
        ranks = of_step[number]
        backward = (max(s.backward_end for s in ranks) - statistics.fmean(s.backward_start for s in ranks)) / 1e6
        whole = statistics.fmean(s.total_s - s.seconds["communication"] for s in ranks)
        found.append(Profile(tuple(sorted(gradients)), backward, max(0.0, whole - backward)))
    return found


def _slow(steps: Sequence[StepOfRank], ranks: Sequence[RankTrace]) -> SlowRank | None:
    """Find the first step from which on one rank is late by more than chance: five standard errors of its own lateness."""
    if len(ranks) < 2:
        return None
    of_step: dict[int, list[StepOfRank]] = defaultdict(list)
    for step in steps:
        of_step[step.step].append(step)
    numbers = sorted(of_step)
    unsure = 2e-6 * max(rank.clock.error_us for rank in ranks)
    least = max(_LEAST_S, _LEAST_SHARE * statistics.fmean(step.total_s for step in steps), unsure)
    late = {rank.about.rank: [_lateness(of_step[number], rank.about.rank) for number in numbers] for rank in ranks}
    for i in range(len(numbers) - _LEAST_STEPS + 1):
        for rank, own in late.items():
            behind = statistics.fmean(own[i:])
            error = statistics.stdev(own[i:]) / math.sqrt(len(own[i:]))
            others = [of for other, of in late.items() if other != rank]
            last = sum(own[k] > max(of[k] for of in others) for k in range(i, len(own)))
            if behind > max(least, _ERRORS * error) and own[i] > least and last >= _MOST_OF * len(own[i:]):
                return _slow_rank(steps, ranks, rank, numbers[i], (last, len(own[i:])), behind)
    return None


def _lateness(steps: Sequence[StepOfRank], rank: int) -> float:
    """Return by how many seconds a rank ends its backward after the others' median; below 0 where it is before them."""
    own = next(step.backward_end for step in steps if step.rank == rank)
    return (own - statistics.median_low([step.backward_end for step in steps if step.rank != rank])) / 1e6


def _slow_rank(
    steps: Sequence[StepOfRank], ranks: Sequence[RankTrace], rank: int, number: int, last: tuple[int, int], behind: float
) -> SlowRank:
    since = [step for step in steps if step.step >= number]
    own, others = _means(s for s in since if s.rank == rank), _means(s for s in since if s.rank != rank)
    part = max(OWN_WORK, key=lambda p: own[p] - others[p])
    host = next(r.about.host for r in ranks if r.about.rank == rank)
    return SlowRank(rank, host, number, last, behind, part, own[part], others[part])


def _means(steps: Iterable[StepOfRank]) -> dict[str, float]:
    chosen = list(steps)
    return {part: statistics.fmean(step.seconds[part] for step in chosen) for part in LABELS}
