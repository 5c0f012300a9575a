"""An elastic job in one process: workers are threads that die, leave and join, and ranks are
assigned again without them.

    job = Job(work, first=2)
    job.run("ab")                           # each of workers "a" and "b" runs `work(engine)`

The real Trainer runs on each. A worker dies when its code raises Killed; the others' next
collective fails, as it does when a process is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.helpers.threads import ThreadEngine, World, without_collections
from trainkit.engine.collectives import PeerError
from trainkit.engine.ranks import Ranks
from trainkit.launch.environment import read_launcher

_PATIENCE_S = 60


class Killed(BaseException):
    """This worker is gone."""


class _Generation(World):
    """A World with ranks that may be lost."""

    def exchange(self, rank: int, value: Any) -> list[Any]:
        try:
            return super().exchange(rank, value)
        except threading.BrokenBarrierError as error:
            raise PeerError("a rank is gone") from error

    def break_off(self) -> None:
        self._barrier.abort()


class Job:
    """The driver of an elastic job.

    Args:
        work: what each worker does with its engine.
        first: how many workers the first generation has.
    """

    def __init__(self, work: Callable[[ElasticThreadEngine], Any], first: int) -> None:
        self._work, self.first = work, first
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._alive: list[str] = []
        self._waiting: dict[str, int] = {}
        self._assignments: dict[str, tuple[_Generation, int]] = {}
        self._old_rank: dict[str, int] = {}
        self.sizes: list[int] = []
        self.results: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}

    def run(self, workers: str) -> None:
        """Start these workers and wait until all have ended;
        raise the first error that is not Killed.
        """
        with without_collections():
            for worker in workers:
                self.start(worker)
            for thread in self._threads:  # grows while workers start others
                thread.join(_PATIENCE_S)
                assert not thread.is_alive(), f"{thread.name} does not end"
        for error in self.errors.values():
            if not isinstance(error, Killed):
                raise error

    def start(self, worker: str) -> None:
        """Start a worker, while the job runs."""
        with self._changed:
            self._alive.append(worker)
        thread = threading.Thread(target=self._run, args=(worker,), name=worker)
        self._threads.append(thread)
        thread.start()

    def _run(self, worker: str) -> None:
        try:
            self.results[worker] = self._work(ElasticThreadEngine(self, worker))
        except BaseException as error:
            self.errors[worker] = error
        finally:
            with self._changed:
                self._alive.remove(worker)
                assignment = self._assignments.pop(worker, None)
                if assignment is not None and worker in self.errors:
                    assignment[0].break_off()
                self._form()

    def join(self, worker: str, commit: int) -> tuple[_Generation, int]:
        """Wait for a place among the living workers."""
        with self._changed:
            self._assignments.pop(worker, None)
            self._waiting[worker] = commit
            self._changed.notify_all()
            self._form()
            assert self._changed.wait_for(lambda: worker in self._assignments, _PATIENCE_S), (
                "the others do not come"
            )
            return self._assignments[worker]

    @property
    def assigned(self) -> set[str]:
        """Those that have a place now."""
        return set(self._assignments)

    def wanted(self) -> bool:
        """Whether a worker waits for the others."""
        return bool(self._waiting)

    def add(self, worker: str) -> None:
        """Start a worker, and return when it waits for the others."""
        self.start(worker)
        with self._changed:
            assert self._changed.wait_for(self.wanted, _PATIENCE_S), f"{worker} does not come"

    def _form(self) -> None:
        running = [worker for worker in self._alive if worker in self._assignments]
        if running or not self._waiting or (not self.sizes and len(self._waiting) < self.first):
            return
        order = sorted(
            self._waiting, key=lambda w: (-self._waiting[w], self._old_rank.get(w, 99), w)
        )
        generation = _Generation(len(order))
        self._assignments = {worker: (generation, rank) for rank, worker in enumerate(order)}
        self._old_rank = {worker: rank for rank, worker in enumerate(order)}
        self._waiting = {}
        self.sizes.append(len(order))
        self._changed.notify_all()


class ElasticThreadRanks(Ranks):
    """Ranks of a Job."""

    is_elastic = True

    def __init__(self, job: Job, worker: str) -> None:
        super().__init__(read_launcher())
        self._job, self.worker = job, worker

    @property
    def first_world_size(self) -> int:
        """See Ranks."""
        return self._job.first

    @property
    def change_requested(self) -> bool:
        """See Ranks."""
        return self._job.wanted()


class ElasticThreadEngine(ThreadEngine):
    """One worker of a Job."""

    def __init__(self, job: Job, worker: str) -> None:
        super().__init__(World(1), 0, ElasticThreadRanks(job, worker))
        self.job, self.worker = job, worker

    def _start(self) -> None:
        self.comm.world, self.comm.place = self.job.join(self.worker, self.ranks.committed_step)
        super()._start()
