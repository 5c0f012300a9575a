"""A model of how gradient reductions overlap backward; what-if questions are answered by running it
with other settings.

A step is its `Profile`: when each gradient is ready, and how long backward takes. Horovod's thread
wakes each cycle, takes the gradients ready on all ranks, fuses them up to a threshold, and reduces
one buffer after the other (Sergeev & Del Balso 2018, "Horovod", section 5). A reduction of S bytes
takes `latency + S / bandwidth` (Hockney 1994); among n ranks in a ring (Patarasuk & Yuan 2009)

    t(S, n) = 2 (n - 1) alpha + 2 (n - 1) / n x S / B

The part that is done when backward ends is hidden; the rest is exposed, and lengthens the step.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

_PAIRS = 20_000  # maximum number of pairs for slopes
_LEAST_CYCLE_S = 1e-6
_PHASES = 4
_LEAST_RANGE, _LEAST_BYTES = 8, 64 * 1024  # of sizes, needed to determine a bandwidth


@dataclass(frozen=True)
class ReductionCost:
    """The cost of a reduction among the ranks of a run."""

    latency_s: float  # seconds of a reduction of any size
    bytes_per_s: float  # bandwidth, in bytes that each rank contributes

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one reduction."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Ring:
    """A network, by the cost of one message between neighbours."""

    alpha_s: float  # its latency
    bytes_per_s: float  # its bandwidth, B

    def link(self, ranks: int) -> ReductionCost:
        """Return the cost of a reduction among `ranks` ranks; zero for one rank."""
        if ranks < 2:
            return ReductionCost(0.0, float("inf"))
        return ReductionCost(
            2 * (ranks - 1) * self.alpha_s, self.bytes_per_s * ranks / (2 * (ranks - 1))
        )


def ring_of(link: ReductionCost, ranks: int) -> Ring:
    """Return the ring in which a reduction among `ranks` ranks, two or more, costs `link`."""
    return Ring(link.latency_s / (2 * (ranks - 1)), link.bytes_per_s * 2 * (ranks - 1) / ranks)


def fit_link(sums: Sequence[tuple[float, float]]) -> ReductionCost | None:
    """Return latency and bandwidth from (bytes, seconds) of reductions; None if the data cannot
    separate them.

    The slope is the median of the slopes between pairs (Theil 1950, Sen 1968): a reduction that was
    delayed does not tilt it. Sizes must span a factor of 8 and reach 64 KiB, and the slope's effect
    must exceed the scatter.
    """
    sizes = sorted(sums)
    if not sizes or sizes[-1][0] < max(_LEAST_RANGE * sizes[0][0], _LEAST_BYTES):
        return None
    pairs = itertools.combinations(sizes[:: max(1, len(sizes) // 200)] + [sizes[-1]], 2)
    slopes = [(tb - ta) / (b - a) for (a, ta), (b, tb) in itertools.islice(pairs, _PAIRS) if b > a]
    slope = statistics.median(slopes)
    latency = statistics.median(t - slope * size for size, t in sizes)
    scatter = statistics.median(abs(t - latency - slope * size) for size, t in sizes)
    if slope <= 0 or slope * (sizes[-1][0] - sizes[0][0]) < scatter:
        return None
    return ReductionCost(max(latency, 0.0), 1 / slope)


@dataclass(frozen=True)
class Profile:
    """A step without its reductions."""

    # (seconds after the start of backward, bytes) of each gradient, at the time the last rank has
    # it; in that order
    ready: tuple[tuple[float, float], ...]
    # seconds of backward, during which gradients become ready; for several microbatches, the last
    # one's
    backward_s: float
    other_s: float  # seconds of all else in a step but exposed communication

    def stretched(self, factor: float) -> Profile:
        """Return the profile of a rank that is slower by `factor`."""
        ready = tuple((at * factor, size) for at, size in self.ready)
        return Profile(ready, self.backward_s * factor, self.other_s * factor)

    def compressed(self, factor: float) -> Profile:
        """Return the profile with `factor` times the bytes per gradient."""
        return replace(self, ready=tuple((at, size * factor) for at, size in self.ready))


@dataclass(frozen=True)
class Summing:
    """How gradients are collected for reductions."""

    # wake-up interval of Horovod's thread; 0 if a reduction starts as soon as it is ready
    # (torch.distributed)
    cycle_s: float = 0.0
    fusion_bytes: float = 0.0  # maximum size of a fused buffer; 0 for one tensor at a time
    copy_s_per_byte: float = 0.0  # cost of copies into the fusion buffer and out of it
    agree_s: float = 0.0  # time per cycle that ranks need to agree on the ready gradients


def exposed_s(profile: Profile, link: ReductionCost, summing: Summing) -> float:
    """Return the seconds that a step waits for reductions after backward has ended.

    Backward may begin at any phase of a cycle: the result is the mean over several.
    """
    if summing.cycle_s < _LEAST_CYCLE_S:
        return _exposed_s(profile, link, replace(summing, cycle_s=0.0), 0.0)
    begins = [summing.cycle_s * i / _PHASES for i in range(_PHASES)]
    return statistics.fmean(_exposed_s(profile, link, summing, begin) for begin in begins)


def _exposed_s(
    profile: Profile, link: ReductionCost, summing: Summing, first_look_s: float
) -> float:
    cycle = summing.cycle_s
    ready = profile.ready
    now = first_look_s
    woken = first_look_s - cycle
    i = 0
    while i < len(ready):
        now = woken = max(now, woken + cycle, 0.0 if cycle else ready[i][0])
        # nothing ready: the thread sleeps until the first cycle with a ready gradient
        if ready[i][0] > now:
            now = woken = now + -(-(ready[i][0] - now) // cycle) * cycle
        now += summing.agree_s
        while i < len(ready) and ready[i][0] <= woken:
            size = ready[i][1]
            tensors = 1
            while i + tensors < len(ready) and ready[i + tensors][0] <= woken:
                if size + ready[i + tensors][1] > summing.fusion_bytes:
                    break
                size += ready[i + tensors][1]
                tensors += 1
            now += link.seconds(size) + (size * summing.copy_s_per_byte if tensors > 1 else 0.0)
            i += tensors
    return max(0.0, now - profile.backward_s)


def step_s(profile: Profile, link: ReductionCost, summing: Summing, accumulate: int = 1) -> float:
    """Return the seconds of `accumulate` microbatches, each of this profile, with one reduction,
    divided by their number.
    """
    return profile.backward_s + profile.other_s + exposed_s(profile, link, summing) / accumulate
