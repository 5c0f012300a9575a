"""Usual: what losses usually are, and which one is a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

_PER_MAD = 1.4826  # standard deviations in a median absolute deviation of normal numbers
_LEAST_DEVIATION = 1e-3  # of the median: losses that do not move at all would make a spike of anything


class Usual:
    """What losses usually are: the median of the last ones, and how far they lie from it.

    A loss is a spike where it lies on the bad side of the median by more than each of the limits that are set: `atol`; `rtol`
    times the median's size; `deviations` standard deviations, estimated as 1.4826 times the median absolute deviation (Hampel
    1974), and a thousandth of the median's size at least. Unlike a mean, the median is not moved by the spike itself. What is a
    spike is not remembered among the usual ones; where as many come in a row as are looked back on, they are the usual ones
    from then on.
    """

    def __init__(
        self, mode: str, window: int, warmup: int, atol: float | None, rtol: float | None, deviations: float | None
    ) -> None:
        self._sign = 1.0 if mode == "min" else -1.0
        self._warmup, self._atol, self._rtol, self._deviations = warmup, atol, rtol, deviations
        self._last: deque[float] = deque(maxlen=window)
        self._leapt: deque[float] = deque(maxlen=window)
        self._seen = 0

    @property
    def median(self) -> float | None:
        """The usual loss; None before the first."""
        return statistics.median(self._last) if self._last else None

    def is_spike(self, loss: float) -> bool:
        """Take a loss; return whether it is a spike. One that is not finite is none here, and is not remembered."""
        if not math.isfinite(loss):
            return False
        self._seen += 1
        leaps = self._seen > self._warmup and len(self._last) > 1 and self._leaps(loss)
        if leaps:
            self._leapt.append(loss)
            if len(self._leapt) == self._leapt.maxlen:
                self._last, self._leapt = self._leapt, deque(maxlen=self._leapt.maxlen)
            return True
        self._leapt.clear()
        self._last.append(loss)
        return False

    def _leaps(self, loss: float) -> bool:
        median = statistics.median(self._last)
        rise, limits = self._sign * (loss - median), [self._atol]
        if self._rtol is not None:
            limits.append(self._rtol * abs(median))
        if self._deviations is not None:
            deviation = _PER_MAD * statistics.median(abs(value - median) for value in self._last)
            limits.append(self._deviations * max(deviation, _LEAST_DEVIATION * abs(median)))
        return rise > 0 and all(rise > limit for limit in limits if limit is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {"last": list(self._last), "leapt": list(self._leapt), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._last.extend(state["last"])
        self._leapt.extend(state["leapt"])
        self._seen = state["seen"]
