"""Finds the workers that block a job:
frozen processes, hung main threads, or collectives that never match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainkit.extensions.elastic.workers import Worker


@dataclass(frozen=True)
class Stall:
    """A stall: the names of the workers that block the others;
    empty if all wait in collectives that never match.
    """

    culprits: tuple[str, ...]
    text: str


def limit(worker: Worker, of_job: float) -> float:
    """Return a worker's `stall_s`; the job's if it has not sent its own yet."""
    return of_job if worker.stall_s is None else worker.stall_s


def frozen(workers: Iterable[Worker], of_job: float, now: float) -> list[Worker]:
    """Return workers whose process is alive but silent for too long."""
    return [
        w for w in workers if w.phase in ("waiting", "running") and now - w.heard > limit(w, of_job)
    ]


def stalled(workers: Iterable[Worker], of_job: float, now: float) -> Stall | None:
    """Return the workers that hang while others have waited too long; None if there are none, or no
    worker waits.

    A job in which no worker waits for another, such as a single rank, has no stall.

    Args:
        workers: of the job.
        of_job: the limit in seconds of workers that have not sent their own yet.
        now: the time.
    """
    all_workers = list(workers)
    running = [w for w in all_workers if w.phase == "running"]
    hang = [w for w in running if now - w.moved > limit(w, of_job)]
    busy = [w for w in hang if not w.waiting]
    blocked = [w for w in hang if w.waiting]
    rejoining = [
        w
        for w in all_workers
        if w.phase == "waiting" and w.assignment is not None and now - w.joined > limit(w, of_job)
    ]
    if busy and (blocked or rejoining):
        waiters = "; ".join(_waits(w, now) for w in blocked + rejoining)
        who = ", ".join(
            f"{w} has made no progress for {now - w.moved:.0f} s and waits for nothing"
            for w in busy
        )
        return Stall(tuple(w.name for w in busy), f"{who}, while {waiters}")
    if not blocked or len(blocked) < len(running):
        return None
    waiters = "; ".join(_waits(w, now) for w in blocked + rejoining)
    # they left the generation: the collectives of the blocked ones will never complete
    if rejoining:
        return Stall(tuple(w.name for w in blocked), waiters)
    return Stall((), waiters) if len(running) > 1 else None


def _waits(worker: Worker, now: float) -> str:
    if worker.phase == "waiting":
        return f"{worker} has waited for a new generation for {now - worker.joined:.0f} s"
    return f"{worker} has waited for {worker.waiting} for {now - worker.moved:.0f} s"
