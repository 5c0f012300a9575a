"""The order of an elastic job's ranks, and its replicas (engine=fsdp engine.replicas=N): workers that
hold the weights together, get their ranks together, and are lost together.

in_order     workers that hold all weights each
complete     workers that hold the weights together: those of whole replicas
incomplete   workers whose replica is not whole any more
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trainkit.extensions.elastic.job import Job
from trainkit.extensions.elastic.workers import Worker

UNREACHED = "its ranks cannot reach each other"
_NEWS_S = 0.5  # from the end of a process until the driver sees it, on a busy host


def in_order(workers: Iterable[Worker]) -> list[Worker]:
    """Return workers in the order of their next ranks.

    Rank 0 gets the newest commit; then the old rank counts, then the order of arrival. The ranks of
    a host are consecutive, and hosts are ordered by their best worker, like in Horovod's own
    launcher: its rings and hierarchies stay within a host.
    """
    by_host: dict[str, list[Worker]] = {}
    for worker in sorted(workers, key=lambda one: _order([one])):
        by_host.setdefault(worker.host, []).append(worker)
    return [worker for on_host in by_host.values() for worker in on_host]


def complete(workers: Iterable[Worker], size: int) -> list[Worker]:
    """Return the workers of whole replicas in the order of their next ranks, replica by replica: the
    replica with the newest commit comes first. New workers form replicas of `size`, of one host each
    where that is possible.
    """
    waiting = list(workers)
    names = {worker.name: worker for worker in waiting}
    old = {worker.replica for worker in waiting if worker.replica}
    whole = [replica for replica in old if names.keys() >= set(replica)]
    replicas = [[names[name] for name in replica] for replica in whole]
    new = in_order(worker for worker in waiting if not worker.replica)
    replicas += [new[first : first + size] for first in range(0, len(new) - size + 1, size)]
    return [worker for replica in sorted(replicas, key=_order) for worker in replica]


def _order(workers: Sequence[Worker]) -> tuple[int, float, int]:
    """Return the sort key of a replica."""
    return (
        -min(worker.commit for worker in workers),
        min(float("inf") if w.assignment is None else w.assignment.rank for w in workers),
        min(worker.came for worker in workers),
    )


def mates(name: str, names: Sequence[str], size: int) -> tuple[str, ...]:
    """Return the names of a worker's replica, if there are any, out of all names in the order of
    ranks.
    """
    if size == 1:
        return ()
    first = names.index(name) // size * size
    return tuple(names[first : first + size])


def incomplete(job: Job) -> Iterator[tuple[Worker, str, bool]]:
    """Yield each worker that must leave with its replica: the worker, why, and whether another one
    of it is gone already, and not only asked to leave.
    """
    for worker in job.alive("waiting", "running"):
        if worker.unwanted or not worker.replica:
            continue
        others = [job.workers[name] for name in worker.replica if name in job.workers]
        gone = [one for one in others if _is_broken(one, job.now) or one.phase == "ending"]
        leaving = [one for one in others if one.unwanted]
        if _is_broken(worker, job.now) or gone:
            why = worker.broken or gone[0].broken or f"it lost {gone[0]}"
            yield worker, f"its replica is not whole: {why}", True
        elif leaving:
            yield worker, f"{leaving[0]} of its replica leaves", False


def _is_broken(worker: Worker, now: float) -> bool:
    """Return whether a worker cannot work with its replica any more. If it alone says so, one of them
    may have been killed just now, which the driver is about to see.
    """
    return bool(worker.broken) and (worker.broken != UNREACHED or now - worker.joined >= _NEWS_S)
