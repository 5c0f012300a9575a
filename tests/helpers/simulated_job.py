"""An elastic job without processes: a state machine, a clock, and workers controlled by a test."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

from trainkit.extensions.elastic.client import RankAssignment
from trainkit.extensions.elastic.messages import Decision, Rules, Say, Send, Start
from trainkit.extensions.elastic.state_machine import StateMachine


class Simulated:
    """Sends events to a state machine, and checks its invariants after each.

    Attributes:
        alive: the names of processes that were started and have not ended, in the order of their
            start.
        starts: all that were started.
        sent: signals by worker.
        said: messages for the user.
        is_together: whether events come at once now.

    Args:
        replica_size: what the workers say of it.
    """

    def __init__(
        self, hosts: dict[str, int] | None = None, replica_size: int = 1, **rules: Any
    ) -> None:
        self.replica_size = replica_size
        self.rules = Rules(**({"np": 2, "min_np": 1} | rules))
        self.now = 100.0
        self.state_machine = StateMachine(self.rules, self.now)
        self.alive: list[str] = []
        self.starts: list[Start] = []
        self.sent: dict[str, list[signal.Signals]] = {}
        self.said: list[str] = []
        self._formed = 0
        self.is_together = False
        self.hosts(hosts if hosts is not None else {"node1": 2})

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Events within the context come at once."""
        self.is_together = True
        with self.state_machine.together(self.now) as decisions:
            yield
        self.is_together = False
        self._obey(decisions)

    # ---- events

    def hosts(self, hosts: dict[str, int]) -> None:
        """The hosts are these now."""
        self._obey(self.state_machine.hosts(self.now, hosts))

    def join(
        self,
        *names: str,
        commit: int = -1,
        generation: int | None = None,
        is_whole: bool = True,
        copies: int = 0,
    ) -> None:
        """Workers come to join."""
        for name in names:
            assignment = self.assignment(name)
            own = (assignment.generation if assignment else 0) if generation is None else generation
            of_replica = self.replica_size, is_whole, copies
            self._obey(self.state_machine.joined(self.now, name, commit, own, *of_replica))

    def beat(
        self,
        *names: str,
        step: int = 0,
        waiting: str = "",
        stall_s: float | None = None,
        raised: bool = False,
    ) -> list[dict[str, Any]]:
        """Workers beat; returns the replies."""
        replies = []
        for name in names:
            assignment = self.assignment(name)
            said = {
                "step": step,
                "progress": step,
                "waiting": waiting,
                "stall_s": stall_s,
                "raised": raised,
            }
            self._obey(
                self.state_machine.beat(
                    self.now,
                    name,
                    said | {"generation": assignment.generation if assignment else 0},
                )
            )
            replies.append(self.state_machine.reply(name))
        return replies

    def exit(self, *names: str, code: int | None = -9) -> None:
        """Processes end."""
        for name in names:
            self.alive.remove(name)
            self._obey(self.state_machine.exited(self.now, name, code))

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Horovodrun gets a signal."""
        self._obey(self.state_machine.signalled(self.now, number))

    def unassigned(self) -> None:
        """A worker calls hvd.init() without a rank."""
        self._obey(self.state_machine.unassigned(self.now))

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps of at most a second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            self._obey(self.state_machine.tick(self.now))

    def sleep(self, seconds: float) -> None:
        """Let time pass in which the driver does not run."""
        self.now += seconds
        self._obey(self.state_machine.tick(self.now))

    # ---- what is known

    def assignment(self, name: str) -> RankAssignment | None:
        """Return a worker's rank."""
        worker = self.state_machine.job.workers.get(name)
        return worker.assignment if worker else None

    def assignments(self) -> list[str]:
        """Return the running ones by rank."""
        workers = self.state_machine.job.workers.values()
        running = [
            (w.assignment.rank, w.name) for w in workers if w.phase == "running" and w.assignment
        ]
        return [name for _, name in sorted(running)]

    @property
    def code(self) -> int | None:
        """Exit code of the job, None while it runs."""
        return None if self.state_machine.job.over is None else self.state_machine.job.over.code

    def wanted(self, name: str) -> bool:
        """Whether a worker is requested to join."""
        worker = self.state_machine.job.workers[name]
        return self.state_machine.reply(name)["wanted"] > (
            worker.assignment.generation if worker.assignment else 0
        )

    def _obey(self, decisions: list[Decision]) -> None:
        if self.is_together:
            assert not decisions
            return
        for decision in decisions:
            if isinstance(decision, Start):
                assert decision.worker not in {start.worker for start in self.starts}, (
                    "a name is used once"
                )
                assert (
                    self.state_machine.job.over is None and self.state_machine.job.stop is None
                ), "nothing is started in a job that ends"
                self.alive.append(decision.worker)
                self.starts.append(decision)
            elif isinstance(decision, Send):
                self.sent.setdefault(decision.worker, []).append(decision.number)
            else:
                assert isinstance(decision, Say)
                self.said.append(decision.text)
        self._check()

    def _check(self) -> None:
        job = self.state_machine.job
        assert set(job.workers) == set(self.alive), "who lives is who is known to live"
        taken = Counter((w.host, w.slot) for w in job.workers.values())
        assert max(taken.values(), default=1) == 1, "a slot holds one process"
        if job.generation == self._formed:
            return
        assert job.generation == self._formed + 1
        self._formed = job.generation
        workers = sorted(
            (w for w in job.workers.values() if w.phase == "running"),
            key=lambda w: w.assignment.rank,
        )  # type: ignore[union-attr]
        assignments = [w.assignment for w in workers if w.assignment is not None]
        least = 1 if job.is_ending else self.rules.min_np if self._formed > 1 else self.rules.np
        assert least <= len(assignments) <= self.rules.most
        assert {assignment.generation for assignment in assignments} == {job.generation}, (
            "no worker runs beside a generation"
        )
        assert [assignment.rank for assignment in assignments] == list(range(len(assignments)))
        assert {assignment.size for assignment in assignments} == {len(assignments)}
        candidates = workers + [
            w
            for w in job.workers.values()
            if w.phase == "waiting" and not (job.is_ending and w.assignment is None)
        ]
        assert workers[0].commit == max(w.commit for w in candidates), "rank 0 has the newest state"
        by_host = {
            host: [w.assignment for w in workers if w.host == host]
            for host in {w.host for w in workers}
        }
        for own in by_host.values():
            assert [assignment.local_rank for assignment in own if assignment] == list(
                range(len(own))
            )
            assert {assignment.local_size for assignment in own if assignment} == {len(own)}
        for local_rank in {assignment.local_rank for assignment in assignments}:
            peers = [
                assignment for assignment in assignments if assignment.local_rank == local_rank
            ]
            assert sorted(assignment.cross_rank for assignment in peers) == list(range(len(peers)))
            assert {assignment.cross_size for assignment in peers} == {len(peers)}
