"""Facts of a recording as plain values: a step of a rank, a gradient's path, a rank that the others wait for."""

from __future__ import annotations

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
OWN_WORK = ("data", "forward", "backward", "optimizer", "hooks")


@dataclass(frozen=True)
class StepOfRank:
    """A step on a rank. Times are microseconds of rank 0's clock.

    Attributes:
        step: its number, `global_step` before it.
        rank: its rank.
        start: start of the step.
        seconds: seconds by part, see LABELS; a validation is left out.
        backward_start: start of the last microbatch's backward.
        backward_end: end of the last microbatch's backward.
        samples: samples of all ranks.
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
        """The sum of all parts."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Gradient:
    """The path of a gradient (or of a bucket of them) through its reduction: means over steps, in seconds.

    Attributes:
        name: name of the parameter.
        num_bytes: bytes that a rank contributes.
        negotiation_s: from the time a rank has it until all ranks have.
        queue_s: from then until its operation begins: Horovod's cycle, and operations before it.
        fusion_s: copies into the fusion buffer and out of it.
        allreduce_s: the collective, of all tensors fused with it.
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
        """The sum of its parts."""
        return self.negotiation_s + self.queue_s + self.fusion_s + self.allreduce_s


@dataclass(frozen=True)
class SlowRank:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        host: its host.
        since: the first step from which on it is the slowest.
        steps: number of steps in which it was last, and of all steps since then.
        behind_s: mean lateness in these steps.
        part: the part of OWN_WORK with the largest difference.
        part_s: seconds of that part on this rank.
        usual_s: seconds of that part on the others.
    """

    rank: int
    host: str
    since: int
    steps: tuple[int, int]
    behind_s: float
    part: str
    part_s: float
    usual_s: float
