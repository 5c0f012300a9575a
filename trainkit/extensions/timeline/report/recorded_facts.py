"""Facts of a recording as plain values:
a step of a rank, a gradient's path, a rank that the others wait for.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LABELS = {
    "data": "data wait",
    "forward": "forward",
    "backward": "backward",
    "waiting": "waiting for a slower rank",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "hooks": "hooks, between steps",
}
SHARED = ("waiting", "communication")  # parts of a step with other ranks
OWN_WORK = ("data", "forward", "backward", "optimizer", "hooks")
CAUSES = (*OWN_WORK, "communication")  # of a long step; waiting is an effect of another rank's
OUTLIER = 3.0  # times the median: a step that took longer is named apart


@dataclass(frozen=True)
class StepOfRank:
    """A step on a rank. Times are microseconds of rank 0's clock."""

    step: int  # its number, `global_step` before it
    rank: int
    start: float  # start of the step
    seconds: dict[str, float]  # seconds by part, see LABELS; a validation is left out
    backward_start: float  # start of the last microbatch's backward
    backward_end: float  # end of the last microbatch's backward
    samples: int  # samples of all ranks

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(self.seconds.values())


def by_step(steps: Iterable[StepOfRank]) -> dict[int, list[StepOfRank]]:
    """Return the ranks of each step by its number."""
    ranks_of_step: dict[int, list[StepOfRank]] = defaultdict(list)
    for step in steps:
        ranks_of_step[step.step].append(step)
    return ranks_of_step


def of_steps(steps: Iterable[StepOfRank], value: Callable[[StepOfRank], float]) -> dict[int, float]:
    """Return the mean of a value over the ranks of each step, by its number."""
    return {number: statistics.fmean(map(value, ranks)) for number, ranks in by_step(steps).items()}


@dataclass(frozen=True)
class Outlier:
    """A step that took several times the median."""

    step: int
    total_s: float  # the mean over ranks
    rank: int  # the one with the part that exceeds its median most
    part: str  # of CAUSES
    part_s: float  # seconds of that part on that rank


@dataclass(frozen=True)
class Gradient:
    """The path of a gradient (or of a bucket of them) through its reduction:
    medians over steps, in seconds.
    """

    name: str  # of the parameter
    num_bytes: int  # bytes that a rank contributes
    negotiation_s: float  # from the time a rank has it until all ranks have
    # from then until its operation begins: Horovod's cycle, and operations before it
    queue_s: float
    fusion_s: float  # copies into the fusion buffer and out of it
    allreduce_s: float  # the collective, of all tensors fused with it
    fused_with: float  # tensors in its operation, itself included

    @property
    def total_s(self) -> float:
        """The sum of its parts."""
        return self.negotiation_s + self.queue_s + self.fusion_s + self.allreduce_s


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for."""

    rank: int
    host: str
    since: int  # the first step from which on it is the slowest
    steps: tuple[int, int]  # number of steps in which it was last, and of all steps since then
    behind_s: float  # mean lateness in these steps
    part: str  # the part of OWN_WORK with the largest difference
    part_s: float  # seconds of that part on this rank
    usual_s: float  # seconds of that part on the others
