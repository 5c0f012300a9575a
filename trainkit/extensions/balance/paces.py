"""The shares that measured paces of ranks ask for. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.data.shares import Shares


def spread(weights: Sequence[float], total: int, limits: Sequence[int]) -> Shares:
    """Return whole numbers of this sum in proportion to `weights`, each at least 1 and at most its
    limit.

    What a limit takes from a rank goes to the others in proportion; remainders go to the largest
    fractions (Hamilton's method).

    Args:
        weights: of each rank, above 0.
        total: the sum, at least one for each rank, and at most the sum of the limits.
        limits: of each rank, 1 or more.
    """
    exact = _within_limits(weights, total, limits)
    samples = [math.floor(part) for part in exact]
    by_fraction = sorted(range(len(exact)), key=lambda rank: samples[rank] - exact[rank])
    for rank in by_fraction:
        if sum(samples) < total and samples[rank] < limits[rank]:
            samples[rank] += 1
    assert sum(samples) == total, "the limits leave room for all samples"
    return tuple(samples)


def _within_limits(weights: Sequence[float], total: int, limits: Sequence[int]) -> list[float]:
    """Return parts of `total` in proportion to `weights`, each from 1 to its limit.

    Each pass divides what is left among the free ranks, and fixes those beyond a bound: all below 1
    if raising them takes more than capping the others frees, or else all above their limits. (CSS
    flexible lengths, section 9.7, are resolved alike.)
    """
    parts: dict[int, float] = {}
    while len(parts) < len(weights):
        free = [rank for rank in range(len(weights)) if rank not in parts]
        rest = total - sum(parts.values())
        weight = sum(weights[rank] for rank in free)
        wanted = {rank: rest * weights[rank] / weight for rank in free}
        bounded = {rank: min(max(wanted[rank], 1), limits[rank]) for rank in free}
        surplus = sum(bounded.values()) - rest
        too_small = {rank: 1 for rank in free if wanted[rank] < 1}
        too_large = {rank: limits[rank] for rank in free if wanted[rank] > limits[rank]}
        parts |= (too_small if surplus > 0 else too_large) or bounded
    return [parts[rank] for rank in range(len(weights))]


@dataclass(frozen=True)
class Pace:
    """What a rank measured over some steps.

    Attributes:
        samples: of its microbatches, above 0.
        compute_s: seconds of their forward and backward, above 0; waiting for other ranks is left
            out.
        rest_s: seconds of everything else in these steps, waiting included.
    """

    samples: int
    compute_s: float
    rest_s: float

    @property
    def sample_s(self) -> float:
        """Seconds of computing a sample."""
        return self.compute_s / self.samples


@dataclass(frozen=True)
class Proposal:
    """Shares of a round that follow from measured paces.

    Attributes:
        samples: of each rank in a round.
        gain: by how much more samples per second the ranks' measured paces promise at their best
            shares: 0.5 for half more.
    """

    samples: Shares
    gain: float


def propose(paces: Sequence[Pace], now: Shares, limits: Sequence[int], damping: float) -> Proposal:
    """Return the next shares.

    At the best shares all ranks compute equally long, so a rank's samples are in proportion to its
    speed. Seconds are taken to grow in proportion to samples; if they do not, later changes
    correct it: equal times are the only fixed point.

    Args:
        paces: of each rank.
        now: samples of each rank in a round.
        limits: samples that a rank may take in a round.
        damping: the part of the present shares that stays, 0 or more and below 1.
    """
    total = sum(now)
    best = spread([1 / pace.sample_s for pace in paces], total, limits)
    slowest = max(paces, key=lambda pace: pace.compute_s)
    rest = slowest.rest_s  # it waits for no other rank
    rounds = sum(pace.samples for pace in paces) / total
    then = max(pace.sample_s * part * rounds for pace, part in zip(paces, best, strict=True))
    gain = (slowest.compute_s + rest) / (then + rest) - 1
    mixed = [damping * old + (1 - damping) * new for old, new in zip(now, best, strict=True)]
    return Proposal(spread(mixed, total, limits), gain)
