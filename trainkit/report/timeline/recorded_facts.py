"""What is known of a recording, in plain values: a step on a rank, a gradient's way, a rank that the others wait for."""

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
