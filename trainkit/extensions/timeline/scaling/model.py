"""How a config scales: measurements at each number of ranks, and a model of other numbers.

The model of a step at n ranks (overlap.py has its parts and their sources):

    t(n) = work(n) + waiting(n) + exposed(n)

work(n) is a rank's own: the measurement at n, or else a line through the nearest two numbers, since
ranks of one host share its memory and cores; beyond the largest measured number hosts are added,
and work stays. waiting(n) is for the slowest of n ranks, whose work varies from step to step with a
standard deviation s: s times the expected maximum of n normal values, by Blom (1958) the normal
quantile of (n - 0.375) / (n + 0.25). exposed(n) is the part of the reductions in a ring of n that
backward does not hide; their cost comes from the recorded steps' reductions if there are any, else
from reductions while nothing else ran.

The same model, fitted without the steps of the largest number of ranks, predicts those: that is its
error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from trainkit.console import plural
from trainkit.extensions.reports.grid import Grid, ms
from trainkit.extensions.timeline.report.overlap import (
    Profile,
    ReductionCost,
    Ring,
    Summing,
    exposed_s,
    fit_link,
    ring_of,
)
from trainkit.extensions.timeline.report.recorded_facts import OWN_WORK, of_steps
from trainkit.extensions.timeline.report.steps import Analysis

PREDICTED = (8, 16, 32, 64, 128, 256, 512)
TRUSTED = 0.2  # if a model's checked error is larger, do not trust its other predictions


@dataclass(frozen=True)
class MeasuredRanks:
    """Measurements at one number of ranks."""

    ranks: int
    analysis: Analysis  # of the recorded steps
    # (bytes, seconds) of reductions while nothing else ran; empty for one rank
    costs: list[tuple[float, float]]

    @property
    def step_s(self) -> float:
        """The median seconds of a step."""
        return self.analysis.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return self.analysis.samples_per_s

    def efficiency(self, base: MeasuredRanks) -> float:
        """Return the speed as a fraction of that of `base`, a rank for a rank."""
        return self.samples_per_s / (base.samples_per_s * self.ranks / base.ranks)


@dataclass(frozen=True)
class Model:
    """See the module docstring."""

    work_of: dict[int, float]  # number of ranks -> a rank's own seconds per step, as measured
    most: int  # the largest measured number of ranks
    profiles: list[Profile]  # steps at `of_ranks` ranks, without their reductions
    of_ranks: int  # see `profiles`
    summing: Summing  # how gradients are collected for reductions
    spread_s: float  # standard deviation of a rank's own work from step to step
    ring: Ring  # the measured network
    ring_from: str  # source of that measurement

    def work_s(self, ranks: int) -> float:
        """Return a rank's own seconds per step."""
        here = min(ranks, self.most)
        known = sorted(self.work_of)
        if here in self.work_of or len(known) == 1:
            return self.work_of.get(here, self.work_of[known[0]])
        after = next((i for i, n in enumerate(known) if n > here), len(known) - 1)
        a = known[max(0, after - 1)]
        b = known[max(1, after)]
        slope = (self.work_of[b] - self.work_of[a]) / (b - a)
        return self.work_of[a] + max(0.0, slope) * (here - a) if here > a else self.work_of[a]

    def exposed_s(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the exposed communication of a step in seconds."""
        if ranks == 1:
            return 0.0
        link = (ring or self.ring).link(ranks)
        slower = self.work_s(ranks) / self.work_s(self.of_ranks)
        return statistics.median(
            exposed_s(profile.stretched(slower), link, self.summing) for profile in self.profiles
        )

    def waiting_s(self, ranks: int) -> float:
        """Return a rank's mean waiting time for the slowest rank."""
        return (
            self.spread_s * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
            if ranks > 1
            else 0.0
        )

    def step_s(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the seconds of a step."""
        return self.work_s(ranks) + self.waiting_s(ranks) + self.exposed_s(ranks, ring)

    def efficiency(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the speed as a fraction of that of as many single ranks."""
        return self.step_s(1) / self.step_s(ranks, ring)


def fit(measured: Sequence[MeasuredRanks]) -> tuple[Model, Model] | None:
    """Return the model without the steps of the largest number of ranks, and that of all.

    None if there is only one number of ranks, or the cost of a reduction is unknown.
    """
    all_measured = sorted(measured, key=lambda m: m.ranks)
    check = _fit(all_measured[:-1], all_measured)
    whole = _fit(all_measured, all_measured)
    return None if check is None or whole is None else (check, whole)


def _fit(base: Sequence[MeasuredRanks], all_measured: Sequence[MeasuredRanks]) -> Model | None:
    several = [m for m in all_measured if m.ranks > 1]
    if not base or not several:
        return None
    source = base[-1]
    link, ring_from, ranks = _link(base, several)
    if link is None:
        return None
    summing = source.analysis.summing
    if source.ranks == 1:  # one rank reduces nothing: take the settings of several
        about = several[0].analysis.abouts[0]
        summing = Summing(about.cycle_ms / 1000, float(about.fusion_bytes))
    profiles = {
        m.ranks: [_without_waiting(profile, m) for profile in m.analysis.profiles] for m in base
    }
    work = {
        n: statistics.median(p.backward_s + p.other_s for p in own)
        for n, own in profiles.items()
        if own
    }
    if source.ranks not in work:
        return None
    # less work at more ranks is chance: see excess_words
    work = {n: max(s for m, s in work.items() if m <= n) for n in work}
    spread = _spread_s(source)
    return Model(
        work,
        all_measured[-1].ranks,
        profiles[source.ranks],
        source.ranks,
        summing,
        spread,
        ring_of(link, ranks),
        ring_from,
    )


def _link(
    base: Sequence[MeasuredRanks], several: Sequence[MeasuredRanks]
) -> tuple[ReductionCost | None, str, int]:
    for one in reversed(base):
        if one.ranks > 1 and one.analysis.link is not None:
            return (
                one.analysis.link,
                f"the sums of the recorded steps at {one.ranks} ranks",
                one.ranks,
            )
    one = next((m for m in reversed(base) if m.ranks > 1), several[0])
    return fit_link(one.costs), f"sums among {one.ranks} ranks while nothing else ran", one.ranks


def _spread_s(source: MeasuredRanks) -> float:
    """Return the spread of a rank's own work from step to step.
    Delays in the same step on all ranks cause no waiting.
    """
    own: dict[int, list[float]] = {}
    for step in source.analysis.steps:
        own.setdefault(step.step, []).append(
            sum(step.seconds[part] for part in OWN_WORK if part != "hooks")
        )
    if source.ranks == 1:
        alone = [times[0] for times in own.values()]
        return statistics.stdev(alone) if len(alone) > 1 else 0.0
    return math.sqrt(statistics.fmean(statistics.variance(times) for times in own.values()))


def _without_waiting(profile: Profile, source: MeasuredRanks) -> Profile:
    waited = source.analysis.median("waiting")
    return Profile(profile.ready, profile.backward_s, max(0.0, profile.other_s - waited))


def measured_grid(measured: Sequence[MeasuredRanks]) -> Grid:
    """Return the table of measurements."""
    rows = []
    for m in measured:
        shares = [
            f"{100 * m.analysis.median(part) / m.analysis.step_s:.1f} %"
            for part in ("data", "waiting", "communication")
        ]
        speed = f"{m.samples_per_s:,.1f}"
        efficiency = f"{100 * m.efficiency(measured[0]):.1f} %"
        rows.append((str(m.ranks), ms(m.step_s), speed, efficiency, *shares))
    columns = ("ranks", "step", "samples/s", "efficiency", "data wait", "waiting", "exposed comm.")
    return Grid("Measured, medians over the steps", columns, rows)


def excess_words(measured: Sequence[MeasuredRanks]) -> list[str]:
    """Explain each efficiency above 100 %: ranks do not make each other faster."""
    said = []
    base = measured[0]
    for m in measured[1:]:
        over = m.efficiency(base) - 1
        if over < 0.0005:  # shown as 100.0 %
            continue
        chance = math.hypot(_uncertainty(base), _uncertainty(m))
        text = (
            f"{100 * (1 + over):.1f} % at {m.ranks} ranks: ranks do not make each other faster, so"
            " the step of "
        )
        text += (
            f"{plural(base.ranks, 'rank')} ({ms(base.step_s)}) was measured too slow, by"
            f" {100 * over:.1f} %. "
        )
        if over <= 2 * chance:
            text += (
                f"That is chance: these medians are known to {200 * chance:.1f} %. More steps"
                " (steps=100) narrow it."
            )
        else:
            text += (
                f"That is more than chance ({200 * chance:.1f} %): something else held it up, as"
                " another job on the host, or data that were read for the first time. Run it"
                " again."
            )
        said.append(text)
    return said


def _uncertainty(measured: MeasuredRanks) -> float:
    """Return the standard error of the median step, relative to it,
    by the spread between quartiles (robust to outliers).
    """
    totals = list(of_steps(measured.analysis.steps, lambda step: step.total_s).values())
    if len(totals) < 2:
        return math.inf
    low, _, high = statistics.quantiles(totals, n=4)
    # of normal values
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(totals)) / measured.step_s


def check_words(model: Model, left_out: MeasuredRanks) -> str:
    """Describe the model's error at the largest number of ranks."""
    predicted = model.step_s(left_out.ranks)
    actual = left_out.step_s
    off = predicted / actual - 1
    text = (
        f"Left out of the model: the steps of {left_out.ranks} ranks. It predicts {ms(predicted)} a"
        f" step there, measured were {ms(actual)}: {100 * off:+.1f} %."
    )
    if abs(off) <= TRUSTED:
        return text
    why = (
        "Something outside of the model slows these ranks down"
        if off < 0
        else "These ranks are faster than the model"
    )
    return f"{text} {why}: do not trust its predictions for more ranks."


def predictions_grid(model: Model, gbits: Sequence[float]) -> Grid:
    """Return the efficiency at larger numbers of ranks."""
    rings = [model.ring, *(network(model.ring, speed) for speed in gbits)]
    rows = [
        (str(n), *(f"{100 * model.efficiency(n, ring):.0f} %" for ring in rings)) for n in PREDICTED
    ]
    names = ["as measured", *(f"{speed:g} Gbit/s" for speed in gbits)]
    return Grid("Predicted efficiency, at the measured latency", ("ranks", *names), rows)


def network(measured: Ring, gbits: float) -> Ring:
    """Return a ring with the measured latency and a bandwidth of `gbits` Gbit/s."""
    return Ring(measured.alpha_s, gbits * 1e9 / 8)
