"""Analysis of a recording: the parts of each step on each rank, each gradient's path, and the
slowest rank.

Ranks wait for each other in the reduction of gradients. The time from the end of a rank's own
backward to the end of its reductions therefore has two parts: `waiting`, until the last rank has
ended its backward, and `communication`, the reductions that no backward hid. On a GPU the parts are
by the device's clock, else by the host's.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.extensions.timeline.report import gradients as of_gradients
from trainkit.extensions.timeline.report.overlap import Profile, ReductionCost, Summing
from trainkit.extensions.timeline.report.recorded_facts import (
    CAUSES,
    LABELS,
    OUTLIER,
    OWN_WORK,
    SHARED,
    Gradient,
    Outlier,
    SlowRank,
    StepOfRank,
    by_step,
    of_steps,
)
from trainkit.extensions.timeline.traces.merge import RankTrace, TraceError
from trainkit.extensions.timeline.traces.pieces import About, Event

# What counts as a slow rank: seconds and share of a step that it is late, share of steps in which
# it is last, their number, standard errors.
_LEAST_S = 0.002
_LEAST_SHARE = 0.03
_MOST_OF = 0.8
_LEAST_STEPS = 5
_ERRORS = 5.0


@dataclass(frozen=True)
class Analysis:
    """The analysis of a recording."""

    abouts: list[About]  # facts about the ranks with files
    steps: list[StepOfRank]  # steps of all ranks
    gradients: list[Gradient]  # longest path first; empty without Horovod's timeline
    slow: SlowRank | None  # the rank that the others wait for, or None
    link: ReductionCost | None  # cost of a reduction here, or None if it cannot be determined
    summing: Summing  # how gradients were collected
    profiles: list[Profile]  # the steps as input of overlap.py; empty without reductions
    unaligned: list[int]  # ranks with clocks that could not be compared
    has_operations: bool = False  # whether there is a record of Horovod's operations

    @property
    def numbers(self) -> list[int]:
        """The numbers of the recorded steps."""
        return sorted({step.step for step in self.steps})

    @property
    def labels(self) -> dict[str, str]:
        """The parts of a step that can be there, with their labels: a rank alone neither waits for
        others nor communicates.
        """
        is_alone = self.abouts[0].world_size == 1
        return {part: label for part, label in LABELS.items() if not (is_alone and part in SHARED)}

    # All figures are medians over the steps: a step that was held up once moves none of them;
    # `outliers` names it.
    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return statistics.median(of_steps(self.steps, lambda step: step.total_s).values())

    def median(self, part: str, rank: int | None = None) -> float:
        """Return the seconds of a part of a step:
        the mean over ranks unless one is given, the median over steps.
        """
        chosen = [step for step in self.steps if rank in (None, step.rank)]
        return statistics.median(of_steps(chosen, lambda step: step.seconds[part]).values())

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return statistics.median(step.samples for step in self.steps) / max(1e-9, self.step_s)

    @property
    def outliers(self) -> list[Outlier]:
        """Steps that took several times the median, longest first;
        each with the rank and the part that held it up.
        """
        usual = {part: self.median(part) for part in LABELS}
        slow = []
        ranks = by_step(self.steps)
        for number, total_s in of_steps(self.steps, lambda step: step.total_s).items():
            if total_s > OUTLIER * self.step_s:
                causes = [
                    (step.seconds[part] - usual[part], step.rank, part)
                    for step in ranks[number]
                    for part in CAUSES
                ]
                more_s, rank, part = max(causes)
                slow.append(Outlier(number, total_s, rank, part, usual[part] + more_s))
        return sorted(slow, key=lambda outlier: -outlier.total_s)


def analyse(ranks: Sequence[RankTrace]) -> Analysis:
    """Analyse a recording.

    Raises:
        TraceError: no step was recorded completely.
    """
    steps = [step for rank in ranks for step in _steps(rank)]
    everywhere = set.intersection(
        *({s.step for s in steps if s.rank == rank.about.rank} for rank in ranks)
    )
    steps = [step for step in steps if step.step in everywhere]
    are_aligned = all(rank.is_aligned for rank in ranks)
    if are_aligned:  # otherwise waiting for a rank and waiting for a reduction cannot be separated
        steps = _split_waiting(steps)
    if not steps:
        raise TraceError(
            "The recording has no step that all ranks finished: it was cut off too early. Record"
            " again."
        )
    handed = of_gradients.handed_over(ranks)
    operations = ranks[0].operations
    gradients = of_gradients.ways(ranks, handed)
    summing, link = of_gradients.costs(ranks[0].about, operations, gradients)
    return Analysis(
        abouts=[rank.about for rank in ranks],
        steps=steps,
        gradients=gradients,
        slow=find_slow_rank(steps, ranks) if are_aligned else None,
        link=link,
        summing=summing,
        profiles=of_gradients.profiles(steps, handed, ranks[0].about),
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
    steps = []
    for number, events in by_step.items():
        backwards = [e for e in events if e["name"] == "backward"]
        if number not in samples or not backwards:  # cut off, or a rank without samples
            continue
        seconds = {
            part: sum(e["dur"] for e in events if e["name"] == part) / 1e6 for part in LABELS
        }
        begun = backwards[-1]["ts"]
        ended = backwards[-1]["ts"] + backwards[-1]["dur"]
        at = [rank.clock.to_rank_0(us) for us in (events[0]["ts"], begun, ended)]
        steps.append(
            StepOfRank(
                number,
                rank.about.rank,
                at[0],
                seconds,
                at[1],
                at[2],
                samples[number],
            )
        )
    return steps


def _split_waiting(steps: list[StepOfRank]) -> list[StepOfRank]:
    last = {
        number: max(step.backward_end for step in of_ranks)
        for number, of_ranks in by_step(steps).items()
    }
    for step in steps:
        waited = min(step.seconds["communication"], (last[step.step] - step.backward_end) / 1e6)
        step.seconds["waiting"] = waited
        step.seconds["communication"] -= waited
    return steps


def find_slow_rank(steps: Sequence[StepOfRank], ranks: Sequence[RankTrace]) -> SlowRank | None:
    """Find the first step from which on one rank is late by more than chance:
    five standard errors of its own lateness.
    """
    if len(ranks) < 2:
        return None
    of_step = by_step(steps)
    numbers = sorted(of_step)
    unsure = 2e-6 * max(rank.clock.error_us for rank in ranks)
    least = max(_LEAST_S, _LEAST_SHARE * statistics.median(step.total_s for step in steps), unsure)
    late = {
        rank.about.rank: [_lateness(of_step[number], rank.about.rank) for number in numbers]
        for rank in ranks
    }
    for i in range(len(numbers) - _LEAST_STEPS + 1):
        for rank, own in late.items():
            behind = statistics.fmean(own[i:])
            error = statistics.stdev(own[i:]) / math.sqrt(len(own[i:]))
            others = [of for other, of in late.items() if other != rank]
            last = sum(own[k] > max(of[k] for of in others) for k in range(i, len(own)))
            # a single late step before that is not the start
            begins = own[i] > max(least, behind / 2)
            if behind > max(least, _ERRORS * error) and begins and last >= _MOST_OF * len(own[i:]):
                return _slow_rank(steps, ranks, rank, numbers[i], (last, len(own[i:])), behind)
    return None


def _lateness(steps: Sequence[StepOfRank], rank: int) -> float:
    """Return the seconds from the others' median end of backward to this rank's;
    negative if it is earlier.
    """
    own = next(step.backward_end for step in steps if step.rank == rank)
    return (
        own - statistics.median_low([step.backward_end for step in steps if step.rank != rank])
    ) / 1e6


def _slow_rank(
    steps: Sequence[StepOfRank],
    ranks: Sequence[RankTrace],
    rank: int,
    number: int,
    last: tuple[int, int],
    behind: float,
) -> SlowRank:
    since = [step for step in steps if step.step >= number]
    own = _means(s for s in since if s.rank == rank)
    others = _means(s for s in since if s.rank != rank)
    part = max(OWN_WORK, key=lambda p: own[p] - others[p])
    host = next(r.about.host for r in ranks if r.about.rank == rank)
    return SlowRank(rank, host, number, last, behind, part, own[part], others[part])


def _means(steps: Iterable[StepOfRank]) -> dict[str, float]:
    chosen = list(steps)
    return {part: statistics.fmean(step.seconds[part] for step in chosen) for part in LABELS}
