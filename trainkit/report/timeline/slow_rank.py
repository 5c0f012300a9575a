"""Finds the rank that the others wait for, and since when, from the ends of backward; chance is excluded statistically."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from trainkit.report.timeline.recorded_facts import LABELS, OWN_WORK, SlowRank, StepOfRank
from trainkit.tracing.merge import RankTrace

_LEAST_S, _LEAST_SHARE, _MOST_OF, _LEAST_STEPS, _ERRORS = 0.002, 0.03, 0.8, 5, 5.0


def find_slow_rank(steps: Sequence[StepOfRank], ranks: Sequence[RankTrace]) -> SlowRank | None:
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
            begins = own[i] > max(least, behind / 2)  # a single late step before that is not the start
            if behind > max(least, _ERRORS * error) and begins and last >= _MOST_OF * len(own[i:]):
                return _slow_rank(steps, ranks, rank, numbers[i], (last, len(own[i:])), behind)
    return None


def _lateness(steps: Sequence[StepOfRank], rank: int) -> float:
    """Return the seconds from the others' median end of backward to this rank's; negative if it is earlier."""
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
