"""A model of how the sums of gradients hide behind backward; what-ifs are answered by running it with another setting.

A step is its `Profile`: when each gradient is ready, how long backward takes. Horovod's thread wakes each cycle, takes what
is ready on all ranks, fuses it up to a threshold, and sums one buffer after the other (Sergeev & Del Balso 2018, "Horovod",
section 5). A sum of S bytes takes `latency + S / bandwidth` (Hockney 1994); among n ranks in a ring (Patarasuk & Yuan 2009)

    t(S, n) = 2 (n - 1) alpha + 2 (n - 1) / n x S / B

What of it is done when backward ends is hidden; the rest is exposed, and makes the step longer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

_PAIRS = 20_000  # of which slopes are taken, at most
_LEAST_CYCLE_S, _PHASES = 1e-6, 4
_LEAST_RANGE, _LEAST_BYTES = 8, 64 * 1024  # of sizes, so that a bandwidth can be told


@dataclass(frozen=True)
class Link:
    """What a sum costs among the ranks that there are.

    Attributes:
        latency_s: of one sum, however small.
        bytes_per_s: of what each rank contributes.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one sum."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Ring:
    """A network, by what one message between neighbours costs.

    Attributes:
        alpha_s: its latency.
        bytes_per_s: its bandwidth, B.
    """

    alpha_s: float
    bytes_per_s: float

    def link(self, ranks: int) -> Link:
        """Return what a sum costs among so many ranks; among one, nothing."""
        if ranks < 2:
            return Link(0.0, float("inf"))
        return Link(2 * (ranks - 1) * self.alpha_s, self.bytes_per_s * ranks / (2 * (ranks - 1)))


def ring_of(link: Link, ranks: int) -> Ring:
    """Return the ring whose sums among so many ranks, two or more, cost as `link` says."""
    return Ring(link.latency_s / (2 * (ranks - 1)), link.bytes_per_s * 2 * (ranks - 1) / ranks)


def fit_link(sums: Sequence[tuple[float, float]]) -> Link | None:
    """Return latency and bandwidth from (bytes, seconds) of sums; None where their sizes or times do not tell them apart.

    The slope is the median of the slopes between pairs (Theil 1950, Sen 1968): a sum that waited for something does not
    tilt it. Sizes must reach over a factor of 8 and up to 64 KiB, and what the slope explains must stand out of the scatter.
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
    return Link(max(latency, 0.0), 1 / slope)


@dataclass(frozen=True)
class Profile:
    """A step without its sums.

    Attributes:
        ready: (seconds after the start of backward, bytes) of each gradient, when the last rank has it; in that order.
        backward_s: of backward, in which gradients become ready; of several microbatches, the last one's.
        other_s: of all else in a step but exposed communication.
    """

    ready: tuple[tuple[float, float], ...]
    backward_s: float
    other_s: float

    def stretched(self, factor: float) -> Profile:
        """Return it as it would be on a rank that is so many times slower."""
        ready = tuple((at * factor, size) for at, size in self.ready)
        return Profile(ready, self.backward_s * factor, self.other_s * factor)

    def compressed(self, factor: float) -> Profile:
        """Return it with gradients of `factor` times the bytes."""
        return replace(self, ready=tuple((at, size * factor) for at, size in self.ready))


@dataclass(frozen=True)
class Summing:
    """How gradients are taken for summing.

    Attributes:
        cycle_s: how often Horovod's thread looks; 0 where a sum starts as soon as it is ready (torch.distributed).
        fusion_bytes: the most that is summed as one; 0 for one by one.
        copy_s_per_byte: into the fusion buffer and out of it.
        agree_s: what ranks need to agree on what is ready, each cycle.
    """

    cycle_s: float = 0.0
    fusion_bytes: float = 0.0
    copy_s_per_byte: float = 0.0
    agree_s: float = 0.0


def exposed_s(profile: Profile, link: Link, summing: Summing) -> float:
    """Return the seconds for which a step waits for sums once backward has ended.

    Backward may begin at any moment of a cycle: the mean over several is returned.
    """
    if summing.cycle_s < _LEAST_CYCLE_S:
        return _exposed_s(profile, link, replace(summing, cycle_s=0.0), 0.0)
    begins = [summing.cycle_s * i / _PHASES for i in range(_PHASES)]
    return statistics.fmean(_exposed_s(profile, link, summing, begin) for begin in begins)


def _exposed_s(profile: Profile, link: Link, summing: Summing, first_look_s: float) -> float:
    cycle = summing.cycle_s
    ready, now, woken, i = profile.ready, first_look_s, first_look_s - cycle, 0
    while i < len(ready):
        now = woken = max(now, woken + cycle, 0.0 if cycle else ready[i][0])
        if ready[i][0] > now:  # nothing yet: the thread sleeps until the first cycle that finds something
            now = woken = now + -(-(ready[i][0] - now) // cycle) * cycle
        now += summing.agree_s
        while i < len(ready) and ready[i][0] <= woken:
            size, tensors = ready[i][1], 1
            while i + tensors < len(ready) and ready[i + tensors][0] <= woken:
                if size + ready[i + tensors][1] > summing.fusion_bytes:
                    break
                size += ready[i + tensors][1]
                tensors += 1
            now += link.seconds(size) + (size * summing.copy_s_per_byte if tensors > 1 else 0.0)
            i += tensors
    return max(0.0, now - profile.backward_s)


def step_s(profile: Profile, link: Link, summing: Summing, accumulate: int = 1) -> float:
    """Return the seconds of `accumulate` microbatches with one sum, divided by their number.

    Args:
        profile: of a step of one microbatch.
        link: among the ranks.
        summing: how gradients are taken.
        accumulate: microbatches with one sum.
    """
    return profile.backward_s + profile.other_s + exposed_s(profile, link, summing) / accumulate
