"""An elastic job's state machine: maps events and the time to decisions; it neither reads a clock
nor starts anything.

    hosts, joined, unassigned, beat, exited, signalled, tick  ->  [Start, Send, Say]; `answer`: to
    workers waiting for a rank

Every event ends in transitions.settle: it ends workers that must leave, forms a generation if none
runs and enough wait, and fills free slots. It looks at all workers, so events that come at once may
share one (`together`). A worker is starting -> waiting -> running -> waiting
...; "ending" once it was asked to end or was killed. job.py holds the state, workers.py workers and
slots, stalls.py finds blocked workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

from trainkit.console import plural
from trainkit.extensions.elastic.job import Job
from trainkit.extensions.elastic.messages import Decision, Over, Rules
from trainkit.extensions.elastic.news import News, news_of
from trainkit.extensions.elastic.replicas import UNREACHED
from trainkit.extensions.elastic.transitions import settle
from trainkit.extensions.elastic.upstream import CHOICE
from trainkit.extensions.elastic.workers import PREEMPTED, Slot, Worker, describe, shell_code


class StateMachine:
    """The state machine of an elastic job; its state is in `job`."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.job = Job(rules, now)
        self._came = 0
        self._is_together = self._is_due = False
        self._news: News | None = None

    @property
    def finished(self) -> bool:
        """Whether the job is over and no process is left."""
        return self.job.over is not None and not self.job.workers

    @contextlib.contextmanager
    def together(self, now: float) -> Iterator[list[Decision]]:
        """Within the context events have no consequences; at its end they have theirs together. Of
        heartbeats alone there are none: the next tick looks at what they said.

        Returns:
            The decisions, once the context has ended.
        """
        decisions: list[Decision] = []
        self._is_together, self._is_due = True, False
        try:
            yield decisions
        finally:
            self._is_together = False
        if self._is_due:
            decisions += self._settle(now)

    def _settle(self, now: float) -> list[Decision]:
        if self._is_together:
            self._is_due = True
            return []
        self._news = None
        return settle(self.job, now)

    # ---- events

    def hosts(self, now: float, hosts: dict[str, int]) -> list[Decision]:
        """Set the hosts, in this order, with their slots."""
        before = self.job.hosts
        self.job.hosts = dict(hosts)
        for host in (before | hosts) if before else ():
            old, new = before.get(host, 0), hosts.get(host, 0)
            if old != new:
                self.job.say(
                    f"{host} has {plural(new, 'slot')} now, {old or 'none'} before"
                    if new
                    else f"{host} is gone"
                )
        if not self.job.generation and sum(hosts.values()) < self.job.need:
            self.job.say(
                f"{plural(sum(hosts.values()), 'slot')} available, {self.job.need} are needed to"
                " start: waiting for more hosts"
            )
        for (host, n), slot in self.job.slots.items():
            if n >= hosts.get(host, 0):
                slot.forget()
        self.job.away = {host: away for host, away in self.job.away.items() if host in hosts}
        for w in self.job.alive("starting", "waiting", "running"):
            gone = w.slot >= hosts.get(w.host, 0)
            if gone and not w.unwanted:
                self._take_away(now, w)
            elif not gone and w.unwanted and w.kill_at is None and self.job.over is None:
                w.unwanted = ""
                w.term_at = None
                self.job.changes = [
                    change for change in self.job.changes if not change[0].startswith(f"{w} ")
                ]
        return self._settle(now)

    def _take_away(self, now: float, w: Worker) -> None:
        w.unwanted = f"slot {w.slot} of {w.host} was removed"
        w.term_at = now + self.job.rules.leave_s
        if w.name in self.job.members:
            self.job.changes.append((f"{w} was removed", now))

    def joined(
        self,
        now: float,
        name: str,
        commit: int,
        generation: int,
        replica_size: int = 1,
        is_whole: bool = True,
        copies: int = 0,
    ) -> list[Decision]:
        """A worker requests a rank; `generation` is that of its last one. See also
        Membership.join.
        """
        rules = self.job.rules
        if replica_size != rules.replica_size:
            self.job.rules = dataclasses.replace(rules, replica_size=replica_size)
        if copies:  # the weights are in as many parts: further slots are those of spare hosts
            self.job.rules = dataclasses.replace(self.job.rules, max_np=rules.np)
        w = self.job.workers.get(name)
        if w is not None:
            w.heard = now
            w.commit = commit
            w.broken = w.broken or ("" if is_whole else UNREACHED)
            self._reached(w)
            if w.phase == "starting":
                self._came += 1
                w.came = self._came
                w.phase = "waiting"
                w.joined = now
                if self.job.generation:
                    self.job.changes.append((f"{w} came", now))
            elif (
                w.phase == "running"
                and w.assignment is not None
                and generation >= w.assignment.generation
            ):
                w.phase = "waiting"
                w.joined = now
        return self._settle(now)

    def unassigned(self, now: float) -> list[Decision]:
        """A worker calls hvd.init() without a rank.
        Before any has one, this says that the script is not trainkit's.
        """
        if not self.job.generation and self.job.stop is None:
            self.job.end(None, self.job.rules.words.unassigned)
        return self._settle(now)

    def beat(self, now: float, name: str, said: dict[str, Any]) -> list[Decision]:
        """A worker's heartbeat: generation, step, progress, waiting, stall_s,
        raised as in client.py.
        """
        w = self.job.workers.get(name)
        if w is not None:
            w.heard = now
            if w.dump == "requested":
                w.dump = ""
            w.stall_s = said["stall_s"]
            w.raised = w.raised or said["raised"]
            self.job.stall_s = self.job.stall_s if w.stall_s is None else w.stall_s
            self._reached(w)
            state = said["step"], said["progress"], said["waiting"]
            if state != (w.step, w.progress, w.waiting):
                w.step, w.progress, w.waiting = state
                w.moved = now
            if (
                w.phase == "running"
                and w.assignment is not None
                and said["generation"] == w.assignment.generation
                and w.got_on
            ):
                self.job.slots[w.host, w.slot].crashes = 0
        return [] if self._is_together else self._settle(now)

    def _reached(self, w: Worker) -> None:
        if self.job.away.pop(w.host, None) is not None:
            self.job.say(f"{w.host} can be reached again")

    def exited(self, now: float, name: str, code: int | None) -> list[Decision]:
        """A worker's process ended: exit code, minus a signal's number,
        or None if the connection to it was lost.
        """
        job = self.job
        job.now = max(job.now, now)
        w = job.workers.pop(name)
        how = describe(code, job.rules.words.lost)
        for other in job.workers.values() if code != 0 else ():
            if name in other.replica:
                other.broken = f"it lost worker {name}"
        if (
            w.assignment is not None
            and w.assignment.generation == job.generation
            and w.assignment.rank == 0
        ):
            job.main_code = shell_code(code)
        if job.over is not None:
            pass
        elif job.stop is not None:
            # a host that is lost says nothing of the others' checkpoint
            if w.assignment is not None and code is not None:
                job.codes.append(shell_code(code))
        elif (w.phase == "ending" and not w.fate) or (w.unwanted and code != 0):
            job.preempted = False
            job.say(f"{w} has left ({how}): {w.unwanted}")
        elif code == 0 and not job.generation:
            job.end(
                1,
                f"{w} ended with 0 and never requested a rank: an elastic job must run trainkit"
                " (python -m trainkit fit ...), or a script with hvd.elastic.run"
                f" ({CHOICE}=horovod)",
            )
        elif code == 0:
            job.members.discard(name)
            job.done_at = now if job.done_at is None else job.done_at
        elif code == PREEMPTED and not w.fate:
            self._leave(now, w, job.slots[w.host, w.slot])
        elif code is None and w.phase == "starting" and not w.heard:
            job.miss(w)
        elif code is None or code < 0 or w.fate or (self._is_of_its_own(w) and not w.raised):
            job.preempted = False
            job.lose(w, w.fate or how)
            job.count_crash(w, w.fate or how)
        else:
            job.end(code, f"{w} {how}: see its output")
        return self._settle(now)

    def _is_of_its_own(self, w: Worker) -> bool:
        """Return whether a failed worker was new among others that train:
        then the cause is its host, not the job.
        """
        return (
            w.commit < 0
            and not w.got_on
            and any(other.commit >= 0 for other in self.job.workers.values())
        )

    def _leave(self, now: float, w: Worker, slot: Slot) -> None:
        self.job.preempted = True
        slot.left = True
        slot.ready_at = now + self.job.rules.pause_s[1]
        self.job.lose(w, f"was preempted and left (exit code {PREEMPTED})")

    def signalled(self, now: float, number: signal.Signals) -> list[Decision]:
        """The driver received SIGTERM or SIGINT: forward it to all workers; of SIGUSR1 (Slurm),
        which a program may not handle, they get SIGTERM.
        """
        job = self.job
        forwarded = signal.SIGTERM if number == signal.SIGUSR1 else number
        if job.over is not None and job.over.code is None:
            job.over = Over(128 + number, f"{number.name} received")
        if job.stop is None and job.over is None:
            job.say(
                f"{number.name} received: all workers get {forwarded.name} and have"
                f" {job.rules.stop_s:g} s to end"
            )
            job.stop = number
        job.forward(forwarded, now)
        return self._settle(now)

    def tick(self, now: float) -> list[Decision]:
        """Time has passed. Called several times a second."""
        return self._settle(now)

    # ---- answers to workers

    def answer(self, name: str) -> dict[str, Any] | None:
        """Return the answer to a worker that requests a rank, or None while it must wait."""
        w = self.job.workers.get(name)
        if w is None:
            return {
                "answer": "end",
                "why": f"the driver does not know worker {name}, or saw it end",
            }
        if self.job.over is not None:
            return {"answer": "end", "why": f"the job is over: {self.job.over.why}"}
        if w.phase == "ending":
            return {"answer": "leave", "why": w.unwanted or w.fate}
        if w.phase == "running" and w.assignment is not None:
            return {"answer": "rank"} | dataclasses.asdict(w.assignment)
        return None

    def reply(self, name: str) -> dict[str, Any]:
        """Return the answer to a worker's heartbeat; stacks are requested only once."""
        reply = self.news().reply(name)
        self.requested(name)
        return reply

    def requested(self, name: str) -> None:
        """Note that a worker was asked for its stacks, which it writes before its next heartbeat."""
        w = self.job.workers.get(name)
        if w is not None and w.dump == "wanted":
            w.dump = "requested"
            self._news = None

    def news(self) -> News:
        """Return what the answers to heartbeats say, as of the last consequences."""
        if self._news is None:
            self._news = news_of(self.job)
        return self._news
