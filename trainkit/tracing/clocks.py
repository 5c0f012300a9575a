"""The clocks of several hosts, aligned by meetings: barriers, of which each rank notes when it came and when it left.

Nobody leaves a barrier before all have come. With o the offset of a rank's clock to rank 0's (rank 0's time = the rank's
+ o), each meeting says

    came_0 <= left_r + o     and     came_r + o <= left_0

so that o lies between came_0 - left_r and left_0 - came_r; several meetings narrow it down (the bounds of Duda et al.
1987, "Estimating global time in distributed systems", with barriers as messages both ways). The middle is taken, and half
the width is a bound of the error, not an estimate. Ranks of one host share a clock; there o is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Meeting = tuple[int, int]  # nanoseconds of the own clock: when this rank came, and when it left


@dataclass(frozen=True)
class Offset:
    """What is added to a rank's clock to get rank 0's.

    Attributes:
        ns: nanoseconds.
        error_ns: it is wrong by so much at most.
        at_ns: of the rank's own clock, when it was measured.
    """

    ns: float
    error_ns: float
    at_ns: float


SAME = Offset(0.0, 0.0, 0.0)


def offset(of_rank_0: Sequence[Meeting], of_rank: Sequence[Meeting]) -> Offset | None:
    """Return a rank's offset from meetings of both, in the same order; None where they contradict each other or lack."""
    pairs = list(zip(of_rank_0, of_rank, strict=False))
    if not pairs:
        return None
    least = max(came_0 - left for (came_0, _), (_, left) in pairs)
    most = min(left_0 - came for (_, left_0), (came, _) in pairs)
    if least > most:
        return None
    return Offset((least + most) / 2, (most - least) / 2, sum(came for _, (came, _) in pairs) / len(pairs))


@dataclass(frozen=True)
class Alignment:
    """A rank's clock against rank 0's over a recording: measured at its start and, where it got so far, at its end.

    Attributes:
        start: at the start.
        end: at the end; equal to `start` where there was none.
    """

    start: Offset = SAME
    end: Offset = SAME

    def to_rank_0(self, us: float) -> float:
        """Return a time of this rank's clock as rank 0's would show it; both in microseconds."""
        between = self.end.at_ns - self.start.at_ns
        share = (us * 1000 - self.start.at_ns) / between if between > 0 else 0.0
        return us + (self.start.ns + (self.end.ns - self.start.ns) * share) / 1000

    @property
    def error_us(self) -> float:
        """It is wrong by so many microseconds at most."""
        return max(self.start.error_ns, self.end.error_ns) / 1000
