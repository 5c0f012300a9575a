"""Whose numbers are wrong, from one microbatch that all ranks have computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.extensions.audit.values import Value

Difference = Callable[[Sequence[Value], Sequence[Value]], str | None]


@dataclass(frozen=True)
class Verdict:
    """What an audit has shown.

    Attributes:
        ranks: that are wrong; if not `decided`, those of which at least one is.
        first: the first value that differs, in the order of the computation.
        decided: whether enough results agree to decide who is wrong.
        repeats: whether the audited rank computes the same when it repeats the microbatch: a fault
            that stays, or that was over.
    """

    ranks: tuple[int, ...]
    first: str
    decided: bool
    repeats: bool


def judge(
    original: Sequence[Value],
    again: Sequence[Sequence[Value]],
    audited: int,
    difference: Difference,
) -> Verdict | None:
    """Return who is wrong; None if all results agree.

    More than half of the ranks decide. Two ranks that disagree are decided by the original: it
    confirms the other rank, or else the audit cannot decide.

    Args:
        original: what the audited rank computed in its step.
        again: what each rank computes from the same microbatch, by rank.
        audited: the audited rank.
        difference: returns the first value that differs, None if none does.
    """
    agreeing = [sum(difference(own, other) is None for other in again) for own in again]
    most = max(range(len(again)), key=lambda rank: agreeing[rank])
    repeats = difference(original, again[audited]) is None
    if 2 * agreeing[most] > len(again):
        truth = again[most]
    else:
        confirmed = [
            rank
            for rank, own in enumerate(again)
            if rank != audited and difference(original, own) is None
        ]
        if not confirmed:
            ranks = tuple(range(len(again)))
            firsts = [difference(original, own) for own in again]
            return Verdict(ranks, next(f for f in firsts if f), decided=False, repeats=repeats)
        truth = original
    wrong = {rank: first for rank, own in enumerate(again) if (first := difference(truth, own))}
    if (first := difference(truth, original)) is not None:
        wrong.setdefault(audited, first)
    if not wrong:
        return None
    ranks = tuple(sorted(wrong))
    return Verdict(ranks, wrong[ranks[0]], decided=True, repeats=repeats)
