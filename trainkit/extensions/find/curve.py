"""The curve of a learning-rate range test, and the rates that it suggests. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_POINTS = 7


def rates_between(least: float, most: float, count: int) -> list[float]:
    """Return so many rates from `least` to `most`, evenly spaced by their logarithm."""
    return [least * (most / least) ** (i / (count - 1)) for i in range(count)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the means over a window around each value, a tenth of the curve wide, in place."""
    half = max(1, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


@dataclass(frozen=True)
class LRCurve:
    """What a learning-rate range test measured (Smith 2017, "Cyclical Learning Rates ...", section
    3.3).

    Attributes:
        lrs: the rate of each step, ascending, in the user's terms: of the parameter group with the
            largest one.
        losses: the mean loss over all samples of the step, on all ranks, before its update.
        factor: what the contract of batch and rate multiplies rates by; the suggestions are without
            it.
        stopped: why the sweep ended early, or "".
    """

    lrs: list[float]
    losses: list[float]
    factor: float = 1.0
    stopped: str = ""

    @property
    def results(self) -> dict[str, list[float]]:
        """The curve, as Lightning's `lr_find` returns it."""
        return {"lr": self.lrs, "loss": self.losses}

    @property
    def smoothed_losses(self) -> list[float]:
        """The losses, smoothed."""
        return smoothed(self.losses)

    def suggestion(self) -> float | None:
        """Return the rate at which the smoothed loss falls most against the rate's logarithm; None
        if it never falls.

        The first and the last points are left out. As Lightning's Tuner.lr_find and fastai's
        `steep`, but on a centred mean.
        """
        losses = self.smoothed_losses
        skip = max(1, len(self.losses) // 20)
        inner = range(skip, len(losses) - skip)
        if len(self.losses) < _LEAST_POINTS:
            return None
        slopes = {i: losses[i + 1] - losses[i - 1] for i in inner if 0 < i < len(losses) - 1}
        best = min(slopes, key=slopes.__getitem__)
        return self.lrs[best] if slopes[best] < 0 else None

    def valley(self) -> float | None:
        """Return the rate in the middle of the longest valley: of the longest falling subsequence
        of the smoothed losses.

        fastai's `valley` (fastai/callback/schedule.py, after ESRI's arcgis.learn), with the
        subsequence's own first point. None if it has less than a tenth of the points.
        """
        losses = self.smoothed_losses
        if len(losses) < _LEAST_POINTS:
            return None
        length = [1] * len(losses)
        before = [-1] * len(losses)
        for i in range(len(losses)):
            for j in range(i):
                if losses[i] < losses[j] and length[i] < length[j] + 1:
                    length[i] = length[j] + 1
                    before[i] = j
        last = max(range(len(losses)), key=length.__getitem__)
        first = last
        while before[first] >= 0:
            first = before[first]
        return None if length[last] < max(3, len(losses) // 10) else self.lrs[(first + last) // 2]


class Divergence:
    """Decides when a sweep ends: if the smoothed loss exceeds a multiple of its best, or a loss is
    not finite.

    The running mean is exponential with bias correction, as Lightning's and fastai's (0.98 there,
    0.8 here: it is for the end alone). A loss may be negative: the limit is counted from the first
    one's size.
    """

    _KEPT = 0.8

    def __init__(self, threshold: float | None) -> None:
        """`threshold` is the multiple; None ends a sweep for losses that are not finite alone."""
        self._threshold = threshold
        self._mean = 0.0
        self._count = 0
        self._best = math.inf
        self._first = 0.0

    def look(self, loss: float) -> str:
        """Return why the sweep ends with this loss, or ""."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        self._first = loss if self._count == 0 else self._first
        self._count += 1
        self._mean = self._KEPT * self._mean + (1 - self._KEPT) * loss
        mean = self._mean / (1 - self._KEPT**self._count)
        self._best = min(self._best, mean)
        limit = self._best + ((self._threshold or math.inf) - 1) * max(
            abs(self._best), 0.1 * abs(self._first)
        )
        return (
            f"the loss is {loss:.4g}, more than {self._threshold:g} times its lowest"
            if mean > limit
            else ""
        )
