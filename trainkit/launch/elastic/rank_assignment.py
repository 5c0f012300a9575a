"""Who gets which rank in a new generation."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.launch.elastic.client import Seat
from trainkit.launch.elastic.workers import Worker


def assign(workers: Iterable[Worker], generation: int, most: float) -> dict[str, Seat]:
    """Return the seats of a generation by the workers' names.

    Rank 0 has the newest commit; then count the old rank and the order of coming. The ranks of a host are consecutive, hosts in
    the order of their best worker, as Horovod's own launcher numbers them: its rings and hierarchies stay within a host.

    Args:
        workers: those that wait.
        generation: the new generation's number.
        most: seats there are; who comes late stays without one.
    """
    chosen = sorted(workers, key=_order)
    if len(chosen) > most:
        chosen = chosen[: int(most)]
    by_host: dict[str, list[Worker]] = {}
    for worker in chosen:
        by_host.setdefault(worker.host, []).append(worker)
    seats = {}
    rank = 0
    for host, crew in by_host.items():
        for local_rank, worker in enumerate(crew):
            peers = [name for name, others in by_host.items() if len(others) > local_rank]
            seats[worker.name] = Seat(
                generation=generation,
                rank=rank,
                size=len(chosen),
                local_rank=local_rank,
                local_size=len(crew),
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
            rank += 1
    return seats


def _order(worker: Worker) -> tuple[int, float, int]:
    return -worker.commit, float("inf") if worker.seat is None else worker.seat.rank, worker.came
