"""Assigns the ranks of a new generation."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.launch.elastic.client import RankAssignment
from trainkit.launch.elastic.workers import Worker


def assign(workers: Iterable[Worker], generation: int, most: float) -> dict[str, RankAssignment]:
    """Return the seats of a generation by the workers' names.

    Rank 0 gets the newest commit; then the old rank counts, then the order of arrival. The ranks of a host are consecutive, and
    hosts are ordered by their best worker, like in Horovod's own launcher: its rings and hierarchies stay within a host.

    Args:
        workers: the waiting workers.
        generation: the new generation's number.
        most: maximum number of seats; late workers get none.
    """
    chosen = sorted(workers, key=_order)
    if len(chosen) > most:
        chosen = chosen[: int(most)]
    by_host: dict[str, list[Worker]] = {}
    for worker in chosen:
        by_host.setdefault(worker.host, []).append(worker)
    seats = {}
    rank = 0
    for host, on_host in by_host.items():
        for local_rank, worker in enumerate(on_host):
            peers = [name for name, others in by_host.items() if len(others) > local_rank]
            seats[worker.name] = RankAssignment(
                generation=generation,
                rank=rank,
                size=len(chosen),
                local_rank=local_rank,
                local_size=len(on_host),
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
            rank += 1
    return seats


def _order(worker: Worker) -> tuple[int, float, int]:
    return -worker.commit, float("inf") if worker.seat is None else worker.seat.rank, worker.came
