"""Who holds up a job: a frozen process, a main thread that hangs, or all that wait for one another."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trainkit.launch.elastic.workers import Worker


@dataclass(frozen=True)
class Stall:
    """What is wrong: the names of those that hold up the others; none: all wait in collectives that never meet."""

    culprits: tuple[str, ...]
    text: str


def limit(worker: Worker, crew: Iterable[Worker]) -> float:
    """Return a worker's `stall_s`; that of the others where it has come and has not said it yet."""
    if worker.stall_s is not None:
        return worker.stall_s
    return max((w.stall_s for w in crew if w.stall_s is not None), default=math.inf)


def frozen(workers: Iterable[Worker], now: float) -> list[Worker]:
    """Return those whose process lives but has been silent for too long."""
    crew = list(workers)
    return [w for w in crew if w.phase in ("waiting", "running") and now - w.heard > limit(w, crew)]


def stalled(workers: Iterable[Worker], now: float) -> Stall | None:
    """Return who hangs while others have waited for them for too long; None: nobody, or nobody waits.

    A job of which nobody waits for anybody, as one rank alone, is nobody's business but its own.
    """
    crew = list(workers)
    running = [w for w in crew if w.phase == "running"]
    hang = [w for w in running if now - w.moved > limit(w, crew)]
    busy = [w for w in hang if not w.waiting]
    blocked = [w for w in hang if w.waiting]
    seatless = [w for w in crew if w.phase == "waiting" and w.seat is not None and w.stall_s is not None]
    seatless = [w for w in seatless if now - w.joined > (w.stall_s or 0.0)]
    if busy and (blocked or seatless):
        waiters = "; ".join(_waits(w, now) for w in blocked + seatless)
        who = ", ".join(f"{w} has not got on for {now - w.moved:.0f} s and waits for nothing" for w in busy)
        return Stall(tuple(w.name for w in busy), f"{who}, while {waiters}")
    if not blocked or len(blocked) < len(running):
        return None
    waiters = "; ".join(_waits(w, now) for w in blocked + seatless)
    if seatless:  # they left the generation: what these wait for cannot come any more
        return Stall(tuple(w.name for w in blocked), waiters)
    return Stall((), waiters) if len(running) > 1 else None


def _waits(worker: Worker, now: float) -> str:
    if worker.phase == "waiting":
        return f"{worker} has waited for a new generation for {now - worker.joined:.0f} s"
    return f"{worker} has waited for {worker.waiting} for {now - worker.moved:.0f} s"
