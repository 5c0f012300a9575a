"""Alignment of the clocks of several hosts, by barriers at which each rank records when it came and
when it left.

No rank leaves a barrier before all ranks have come. With o the offset of a rank's clock to rank 0's
(rank 0's time = the rank's
+ o), each barrier gives

    came_0 <= left_r + o     and     came_r + o <= left_0

so that o is between came_0 - left_r and left_0 - came_r; several barriers narrow the interval (the
bounds of Duda et al. 1987, "Estimating global time in distributed systems", with barriers as
messages both ways). The offset is the middle of the interval, and half its width is a bound on the
error, not an estimate. Ranks of one host share a clock; there o is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# nanoseconds of the rank's own clock: arrival at a barrier, and departure
Meeting = tuple[int, int]


@dataclass(frozen=True)
class Offset:
    """The offset from a rank's clock to rank 0's."""

    ns: float  # nanoseconds to add
    error_ns: float  # maximum error
    at_ns: float  # time of the measurement, by the rank's own clock


SAME = Offset(0.0, 0.0, 0.0)


def offset(of_rank_0: Sequence[Meeting], of_rank: Sequence[Meeting]) -> Offset | None:
    """Return a rank's offset from barriers of both ranks, in the same order;
    None if these are missing or inconsistent.
    """
    pairs = list(zip(of_rank_0, of_rank, strict=False))
    if not pairs:
        return None
    least = max(came_0 - left for (came_0, _), (_, left) in pairs)
    most = min(left_0 - came for (_, left_0), (came, _) in pairs)
    if least > most:
        return None
    return Offset(
        (least + most) / 2, (most - least) / 2, sum(came for _, (came, _) in pairs) / len(pairs)
    )


@dataclass(frozen=True)
class Alignment:
    """A rank's clock against rank 0's during a recording:
    measured at its start and, if the recording got there, at its end.
    """

    start: Offset = SAME  # offset at the start
    end: Offset = SAME  # offset at the end; equal to `start` if there is none

    def to_rank_0(self, us: float) -> float:
        """Convert a time of this rank's clock to rank 0's; both in microseconds."""
        between = self.end.at_ns - self.start.at_ns
        share = (us * 1000 - self.start.at_ns) / between if between > 0 else 0.0
        return us + (self.start.ns + (self.end.ns - self.start.ns) * share) / 1000

    @property
    def error_us(self) -> float:
        """Maximum error in microseconds."""
        return max(self.start.error_ns, self.end.error_ns) / 1000
