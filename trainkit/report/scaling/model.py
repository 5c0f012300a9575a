"""How a config scales: what was measured at each number of ranks, and what a model says of others.

The model of a step at n ranks (overlap.py has its parts and their sources):

    t(n) = work(n) + waiting(n) + exposed(n)

work(n) is a rank's own: what was measured at n, else a line through the nearest two numbers, since ranks of one host share
its memory and cores; beyond the largest number that was measured hosts are added, and work stays. waiting(n) is for the
slowest of n ranks, whose work varies from step to step by a standard deviation s: s times the expected largest of n normal
values, by Blom (1958) the normal quantile of (n - 0.375) / (n + 0.25). exposed(n) is what sums in a ring of n leave behind
backward; their cost is that of the recorded steps' sums where there were any, else of sums while nothing else ran.

The same model without the steps of the largest number of ranks says what these should take: so far it is off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from trainkit.report.grid import Grid, ms
from trainkit.report.timeline.overlap import Link, Profile, Ring, Summing, exposed_s, fit_link, ring_of
from trainkit.report.timeline.recorded_facts import OWN_WORK
from trainkit.report.timeline.steps import Analysis

PREDICTED = (8, 16, 32, 64, 128, 256, 512)
TRUSTED = 0.2  # a model that is off by more where it can be checked is not to be believed elsewhere


@dataclass(frozen=True)
class Measured:
    """One number of ranks.

    Attributes:
        ranks: how many.
        analysis: of the recorded steps.
        costs: (bytes, seconds) of sums when nothing else ran; empty for one rank.
    """

    ranks: int
    analysis: Analysis
    costs: list[tuple[float, float]]

    @property
    def step_s(self) -> float:
        """The median seconds of a step, over all ranks."""
        return statistics.median(step.total_s for step in self.analysis.steps)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        samples = statistics.median(step.samples for step in self.analysis.steps)
        return samples / self.step_s


@dataclass(frozen=True)
class Model:
    """See the module.

    Attributes:
        work_of: number of ranks -> a rank's own seconds in a step, as measured.
        most: the largest number of ranks that was measured.
        profiles: steps of `of_ranks` ranks, without their sums.
        of_ranks: see `profiles`.
        summing: how gradients are taken.
        spread_s: the standard deviation of a rank's own work from step to step.
        ring: the network that was measured.
        ring_from: how that was done.
    """

    work_of: dict[int, float]
    most: int
    profiles: list[Profile]
    of_ranks: int
    summing: Summing
    spread_s: float
    ring: Ring
    ring_from: str

    def work_s(self, ranks: int) -> float:
        """Return a rank's own seconds in a step."""
        here, known = min(ranks, self.most), sorted(self.work_of)
        if here in self.work_of or len(known) == 1:
            return self.work_of.get(here, self.work_of[known[0]])
        after = next((i for i, n in enumerate(known) if n > here), len(known) - 1)
        a, b = known[max(0, after - 1)], known[max(1, after)]
        slope = (self.work_of[b] - self.work_of[a]) / (b - a)
        return self.work_of[a] + max(0.0, slope) * (here - a) if here > a else self.work_of[a]

    def exposed_s(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the exposed communication of a step."""
        if ranks == 1:
            return 0.0
        link, slower = (ring or self.ring).link(ranks), self.work_s(ranks) / self.work_s(self.of_ranks)
        return statistics.fmean(exposed_s(profile.stretched(slower), link, self.summing) for profile in self.profiles)

    def waiting_s(self, ranks: int) -> float:
        """Return how long a rank waits in the mean for the slowest."""
        return self.spread_s * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0

    def step_s(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the seconds of a step."""
        return self.work_s(ranks) + self.waiting_s(ranks) + self.exposed_s(ranks, ring)

    def efficiency(self, ranks: int, ring: Ring | None = None) -> float:
        """Return the share of what as many single ranks would do."""
        return self.step_s(1) / self.step_s(ranks, ring)


def fit(measured: Sequence[Measured]) -> tuple[Model, Model] | None:
    """Return the model without the steps of the largest number of ranks, and that of all.

    None where there is but one number of ranks, or no sum's cost is known.
    """
    everyone = sorted(measured, key=lambda m: m.ranks)
    check, whole = _fit(everyone[:-1], everyone), _fit(everyone, everyone)
    return None if check is None or whole is None else (check, whole)


def _fit(base: Sequence[Measured], everyone: Sequence[Measured]) -> Model | None:
    several = [m for m in everyone if m.ranks > 1]
    if not base or not several:
        return None
    source = base[-1]
    link, told, ranks = _link(base, several)
    if link is None:
        return None
    summing = source.analysis.summing
    if source.ranks == 1:  # nobody summed; what was set for several is no measurement
        about = several[0].analysis.abouts[0]
        summing = Summing(about.cycle_ms / 1000, float(about.fusion_bytes))
    profiles = {m.ranks: [_without_waiting(profile, m) for profile in m.analysis.profiles] for m in base}
    work = {n: statistics.median(p.backward_s + p.other_s for p in own) for n, own in profiles.items() if own}
    if source.ranks not in work:
        return None
    spread = _spread_s(source)
    return Model(work, everyone[-1].ranks, profiles[source.ranks], source.ranks, summing, spread, ring_of(link, ranks), told)


def _link(base: Sequence[Measured], several: Sequence[Measured]) -> tuple[Link | None, str, int]:
    for one in reversed(base):
        if one.ranks > 1 and one.analysis.link is not None:
            return one.analysis.link, f"the sums of the recorded steps at {one.ranks} ranks", one.ranks
    one = next((m for m in reversed(base) if m.ranks > 1), several[0])
    return fit_link(one.costs), f"sums among {one.ranks} ranks while nothing else ran", one.ranks


def _spread_s(source: Measured) -> float:
    """Return by how much a rank's own work varies from step to step. What comes at one step on all ranks makes nobody wait."""
    own: dict[int, list[float]] = {}
    for step in source.analysis.steps:
        own.setdefault(step.step, []).append(sum(step.seconds[part] for part in OWN_WORK if part != "hooks"))
    if source.ranks == 1:
        alone = [times[0] for times in own.values()]
        return statistics.stdev(alone) if len(alone) > 1 else 0.0
    return math.sqrt(statistics.fmean(statistics.variance(times) for times in own.values()))


def _without_waiting(profile: Profile, source: Measured) -> Profile:
    waited = source.analysis.mean("waiting")
    return Profile(profile.ready, profile.backward_s, max(0.0, profile.other_s - waited))


def measured_grid(measured: Sequence[Measured]) -> Grid:
    """Return what was measured."""
    one = measured[0]
    rows = []
    for m in measured:
        means = [f"{100 * m.analysis.mean(part) / m.analysis.step_s:.1f} %" for part in ("data", "waiting", "communication")]
        ideal = one.samples_per_s * m.ranks / one.ranks
        speed = f"{m.samples_per_s:,.1f}"
        rows.append((str(m.ranks), ms(m.step_s), speed, f"{100 * m.samples_per_s / ideal:.1f} %", *means))
    columns = ("ranks", "step", "samples/s", "efficiency", "data wait", "waiting", "exposed comm.")
    return Grid("Measured", columns, rows)


def check_words(model: Model, left_out: Measured) -> str:
    """Say how far the model is off where it can be checked."""
    said, is_ = model.step_s(left_out.ranks), left_out.step_s
    off = said / is_ - 1
    told = (
        f"Left out of the model: the steps of {left_out.ranks} ranks. It says {ms(said)} a step there, measured were "
        f"{ms(is_)}: {100 * off:+.1f} %."
    )
    if abs(off) <= TRUSTED:
        return told
    return f"{told} Something slows these ranks down that the model does not know: do not trust what it says of more ranks."


def predictions_grid(model: Model, gbits: Sequence[float]) -> Grid:
    """Return the efficiency at larger numbers of ranks."""
    rings = [model.ring, *(network(model.ring, speed) for speed in gbits)]
    rows = [(str(n), *(f"{100 * model.efficiency(n, ring):.0f} %" for ring in rings)) for n in PREDICTED]
    names = ["as measured", *(f"{speed:g} Gbit/s" for speed in gbits)]
    return Grid("Predicted efficiency, at the measured latency", ("ranks", *names), rows)


def network(measured: Ring, gbits: float) -> Ring:
    """Return a ring with the latency that was measured and a bandwidth of so many Gbit/s."""
    return Ring(measured.alpha_s, gbits * 1e9 / 8)
