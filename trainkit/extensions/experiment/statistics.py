"""The interval of a difference of means, paired and unpaired.

paired     d_i = b_i - a_i of each seed; mean(d) +- t(n - 1) s(d) / sqrt(n)            (Student 1908)
unpaired   mean(b) - mean(a) +- t(nu) sqrt(s(a)^2 / n + s(b)^2 / n), the two sides' variances being
           unequal; nu by Welch (1947) and Satterthwaite (1946)

Student, "The probable error of a mean", Biometrika 6(1), 1908. B. L. Welch, "The generalization of
'Student's' problem when several different population variances are involved", Biometrika 34, 1947.
Both as in NIST/SEMATECH, e-Handbook of Statistical Methods, 1.3.5.3. They take differences (values)
of different seeds to be independent, and about normal. The home of scipy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import ConfigError

try:
    from scipy import stats  # type: ignore[import-untyped]
except ImportError:  # an extra
    stats = None

LEVEL = 0.95
Verdict = Literal["a better", "b better", "no difference shown"]


@dataclass(frozen=True)
class Interval:
    """A difference of means, b - a, and the half width of its interval.

    Attributes:
        difference: mean of b less mean of a.
        half_width: of the interval at LEVEL; infinite with one seed.
        degrees: of freedom.
    """

    difference: float
    half_width: float
    degrees: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.difference - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.difference + self.half_width

    def verdict(self, mode: str) -> Verdict:
        """Return which side is better, if the interval leaves 0 out.

        Args:
            mode: "min" or "max": which value is better.
        """
        if self.low <= 0 <= self.high or not math.isfinite(self.half_width):
            return "no difference shown"
        return "b better" if (self.difference < 0) == (mode == "min") else "a better"


def paired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the interval of the mean of b_i - a_i; see the module.

    Args:
        a: a value for each seed.
        b: the same, of the same seeds in the same order.
    """
    differences = [second - first for first, second in zip(a, b, strict=True)]
    mean = statistics.fmean(differences)
    count = len(differences)
    if count < 2:
        return Interval(mean, math.inf, 0)
    error = statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean, _quantile(count - 1) * error, count - 1)


def unpaired(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return Welch's interval, which does not know which values share a seed; see the module."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    if min(len(a), len(b)) < 2:
        return Interval(difference, math.inf, 0)
    parts = [statistics.variance(side) / len(side) for side in (a, b)]
    if not sum(parts):
        return Interval(difference, 0.0, len(a) + len(b) - 2)
    below = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    degrees = sum(parts) ** 2 / below
    return Interval(difference, _quantile(degrees) * math.sqrt(sum(parts)), degrees)


def _quantile(degrees: float) -> float:
    """Return the quantile of Student's t for a two-sided interval at LEVEL."""
    require()
    return float(stats.t.ppf(0.5 + LEVEL / 2, degrees))


def require() -> None:
    """Raise ConfigError if scipy is not installed."""
    if stats is None:
        raise ConfigError(
            "experiment needs scipy for its intervals, which is not installed. Install it: pip"
            " install 'trainkit[experiment]'"
        )
