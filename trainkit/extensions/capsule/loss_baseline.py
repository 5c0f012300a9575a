"""LossBaseline: the baseline of recent losses, and the test for a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_PER_MAD = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_LEAST_DEVIATION = 1e-3  # of the median: with constant losses any change would be a spike otherwise


class LossBaseline:
    """The usual loss: the median of the last losses, and their spread around it.

    A loss is a spike if it is worse than the median by more than each limit that is set: `atol`;
    `rtol` times the median's magnitude; `deviations` standard deviations, estimated as 1.4826 times
    the median absolute deviation (Hampel 1974), and at least a thousandth of the median's
    magnitude. Unlike a mean, the median is not moved by the spike itself. Spikes do not enter the
    baseline; but a series of spikes as long as the window becomes the new baseline.
    """

    def __init__(
        self,
        mode: str,
        window: int,
        warmup: int,
        atol: float | None,
        rtol: float | None,
        deviations: float | None,
    ) -> None:
        self._sign = 1.0 if mode == "min" else -1.0
        self._warmup = warmup
        self._atol = atol
        self._rtol = rtol
        self._deviations = deviations
        self._last: deque[float] = deque(maxlen=window)
        self._spikes: deque[float] = deque(maxlen=window)
        self._seen = 0

    @property
    def median(self) -> float | None:
        """The usual loss; None before the first loss."""
        return statistics.median(self._last) if self._last else None

    def is_spike(self, loss: float) -> bool:
        """Add a loss; return whether it is a spike.
        A loss that is not finite is neither a spike nor part of the baseline.
        """
        if not math.isfinite(loss):
            return False
        self._seen += 1
        is_spike = self._seen > self._warmup and len(self._last) > 1 and self._exceeds_limits(loss)
        if is_spike:
            self._spikes.append(loss)
            if len(self._spikes) == self._spikes.maxlen:
                self._last = self._spikes
                self._spikes = deque(maxlen=self._spikes.maxlen)
            return True
        self._spikes.clear()
        self._last.append(loss)
        return False

    def _exceeds_limits(self, loss: float) -> bool:
        median = statistics.median(self._last)
        rise = self._sign * (loss - median)
        limits = [self._atol]
        if self._rtol is not None:
            limits.append(self._rtol * abs(median))
        if self._deviations is not None:
            deviation = _PER_MAD * statistics.median(abs(value - median) for value in self._last)
            limits.append(self._deviations * max(deviation, _LEAST_DEVIATION * abs(median)))
        return rise > 0 and all(rise > limit for limit in limits if limit is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the baseline's state."""
        return {"last": list(self._last), "leapt": list(self._spikes), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._last.extend(state["last"])
        self._spikes.extend(state["leapt"])
        self._seen = state["seen"]
