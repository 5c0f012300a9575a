"""Ways to shorten a recorded step,
with the gain that the model of overlap.py predicts for each setting.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from trainkit.data.shares import parse_shares
from trainkit.extensions.reports.grid import human, ms, share
from trainkit.extensions.timeline.report.overlap import Profile, ReductionCost, Summing, exposed_s
from trainkit.extensions.timeline.report.steps import Analysis

_LEAST_GAIN = 0.01
_CYCLES_MS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_FUSIONS_MB = (0.0, 1.0, 4.0, 16.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    setting: str  # the command line argument, or another action
    why: str  # the number that it follows from
    gain: float  # predicted growth of samples per second: 0.12 for 12 %
    is_bound: bool = False  # whether the gain is an upper bound instead of an estimate


def advise(analysis: Analysis) -> list[Advice]:
    """Return advice, largest gain first; gains below one percent are left out."""
    advices = [
        *_data(analysis),
        *_waiting(analysis),
        *_sums(analysis),
        *_fewer_sums(analysis),
        *_rest(analysis),
    ]
    return sorted(
        (advice for advice in advices if advice.gain >= _LEAST_GAIN),
        key=lambda advice: -advice.gain,
    )


def _gain(step_s: float, saved_s: float) -> float:
    """Return the relative growth of samples per second if a step loses `saved_s`."""
    return step_s / max(step_s - saved_s, 0.05 * step_s) - 1


def _data(analysis: Analysis) -> Iterator[Advice]:
    step = analysis.step_s
    wait = analysis.median("data")
    stalls = [outlier.total_s - step for outlier in analysis.outliers if outlier.part == "data"]
    # a loader that falls behind stalls single steps, and the median of its waits may be zero
    if len(stalls) > 1:
        lost = sum(stalls) / len(analysis.numbers)
        step = step + lost
        wait = wait + lost
    if wait < _LEAST_GAIN * step:
        return
    workers = max(about.workers for about in analysis.abouts)
    why = f"a step waits {ms(wait)} for the loader ({share(wait, step)})"
    if workers > 0:  # the loader limits: twice the workers halve a step, until nothing waits
        yield Advice(
            f"data.num_workers={2 * workers}",
            f"{why}, with {workers} workers",
            _gain(step, min(wait, step / 2)),
            True,
        )
    else:
        setting = "data.num_workers=2 or more"
        yield Advice(
            setting, f"{why}; no worker loads in parallel to training", _gain(step, wait), True
        )


def _waiting(analysis: Analysis) -> Iterator[Advice]:
    step = analysis.step_s
    slow = analysis.slow
    if slow is not None:
        waited = statistics.median(
            s.seconds["waiting"] for s in analysis.steps if s.rank != slow.rank
        )
        if slow.part in ("forward", "backward"):
            why = (
                f"rank {slow.rank} computes longest; it gives each rank samples by its speed, and"
                " the gradient stays"
            )
            yield Advice("callbacks=balance", why, _gain(step, _balanced_s(analysis)))
        why = f"it ends its backward {ms(slow.behind_s)} after the others"
        yield Advice(
            f"make rank {slow.rank} on {slow.host} as fast as the others",
            why,
            _gain(step, waited),
            True,
        )


def _balanced_s(analysis: Analysis) -> float:
    """Return the seconds that a step's slowest rank computes less if all compute equally long;
    see balance/paces.py.
    """
    ranks = [about.rank for about in analysis.abouts]
    all_shares = parse_shares(analysis.abouts[0].rank_shares)
    shares = [1 if all_shares is None else all_shares[rank] for rank in ranks]
    own = [analysis.median("forward", rank) + analysis.median("backward", rank) for rank in ranks]
    return max(own) - sum(shares) / sum(
        share / seconds for share, seconds in zip(shares, own, strict=True)
    )


def _sums(analysis: Analysis) -> Iterator[Advice]:
    """Return advice on Horovod's settings, and on fewer bytes."""
    link = analysis.link
    now = analysis.summing
    profiles = analysis.profiles
    if link is None or not profiles:
        return
    measured = analysis.median("communication")
    base = _exposed(profiles, link, now)
    if now.cycle_s:
        cycles = {cycle_ms: replace(now, cycle_s=cycle_ms / 1000) for cycle_ms in _CYCLES_MS}
        fusions = {mb: replace(now, fusion_bytes=mb * 2**20) for mb in _FUSIONS_MB}
        for name, tries in (("cycle_time_ms", cycles), ("fusion_threshold_mb", fusions)):
            saved_by = {
                value: base - _exposed(profiles, link, other) for value, other in tries.items()
            }
            best, saved = max(saved_by.items(), key=itemgetter(1))
            why = (
                f"{ms(measured)} of reductions are not hidden; the model predicts {ms(base)} now,"
                f" {ms(base - saved)} then"
            )
            yield Advice(
                f"engine.{name}={best:g}", why, _gain(analysis.step_s, min(saved, measured))
            )
    if analysis.abouts[0].wire == "none":
        half = [profile.compressed(0.5) for profile in profiles]
        saved = base - _exposed(half, link, now)
        total = statistics.fmean(sum(size for _, size in p.ready) for p in profiles)
        why = (
            f"half of {human(total)} a step; the model leaves out the cost of packing, and float16"
            " rounds"
        )
        yield Advice("engine.compression=fp16", why, _gain(analysis.step_s, min(saved, measured)))


def _exposed(profiles: list[Profile], link: ReductionCost, summing: Summing) -> float:
    return statistics.median(exposed_s(profile, link, summing) for profile in profiles)


def _fewer_sums(analysis: Analysis) -> Iterator[Advice]:
    """Return advice that spreads the cost per step over more samples."""
    step = analysis.step_s
    exposed = analysis.median("communication")
    optimizer = analysis.median("optimizer")
    accumulate = analysis.abouts[0].accumulate
    rest: Callable[[int], float] = lambda k: (  # noqa: E731
        (step - exposed - optimizer) + (exposed + optimizer) / k
    )
    if exposed >= _LEAST_GAIN * step:
        why = (
            f"exposed communication ({ms(exposed)}) and the update ({ms(optimizer)}) are paid once"
            " for twice the samples"
        )
        effect = "; the batch of a step doubles, and with it the rate"
        gain = step / rest(2) - 1
        yield Advice(f"trainer.accumulate_grad_batches={2 * accumulate}", why + effect, gain)
        yield Advice(
            "twice the data.batch_size, if memory suffices", why + f"; more on a GPU{effect}", gain
        )


def _rest(analysis: Analysis) -> Iterator[Advice]:
    step = analysis.step_s
    hooks = analysis.median("hooks")
    optimizer = analysis.median("optimizer")
    if hooks >= 0.02 * step:
        why = f"{ms(hooks)} go into callbacks and logging between steps ({share(hooks, step)})"
        yield Advice(
            "find which with trainer.profiler=simple; a larger trainer.log_every_n_steps",
            why,
            _gain(step, hooks),
            True,
        )
    if optimizer >= 0.1 * step and analysis.abouts[0].device != "cpu":
        why = f"the update takes {ms(optimizer)} ({share(optimizer, step)})"
        yield Advice(
            "fewer and larger parameters, or larger steps (trainer.accumulate_grad_batches)",
            why,
            _gain(step, optimizer),
            True,
        )
