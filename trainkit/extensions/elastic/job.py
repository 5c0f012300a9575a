"""Job: the state of an elastic job, and the small changes shared by events and decisions."""

from __future__ import annotations

import math
import signal

from trainkit.console import plural
from trainkit.extensions.elastic.messages import Decision, Over, Rules, Say, Send
from trainkit.extensions.elastic.stalls import Stall
from trainkit.extensions.elastic.workers import Away, Slot, Worker

_DOUBLINGS = 12  # of a second, more than an hour: the longest pause that may be set


class Job:
    """One job's workers, slots and generation."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.now = now
        self.generation = 0  # number of the newest generation, 0 before the first
        # how the job ended; None while it runs. Its processes may outlive that.
        self.over: Over | None = None
        self.workers: dict[str, Worker] = {}  # workers with a live process, by name
        self.hosts: dict[str, int] = {}  # slots by host, in the order in which they are filled
        # slots by host and number, including those of removed hosts
        self.slots: dict[tuple[str, int], Slot] = {}
        self.away: dict[str, Away] = {}  # hosts to which no connection can be made, by name
        self.members: set[str] = set()  # members of the newest generation that are not done
        self.failed: set[int] = set()  # numbers of the generations of which a member crashed
        # (event, time) since the newest generation was formed
        self.changes: list[tuple[str, float]] = []
        self.short_s = 0.0  # seconds with too few workers since a generation was last formed
        self.stop: signal.Signals | None = None  # the signal that ends the job
        self.codes: list[int] = []  # exit codes, since that signal, of workers that ever had a rank
        self.done_at: float | None = None  # time at which the first worker was done
        # exit code of rank 0 of the newest generation, once it has ended
        self.main_code: int | None = None
        self.preempted = False  # whether the last lost worker left voluntarily
        # the limit that a worker sent last: that of a new one, which has not sent its own yet, also
        # where all are new
        self.stall_s = math.inf
        # the current stall, and the time at which to act on it
        self.stall: tuple[Stall, float] | None = None
        self.out: list[Decision] = []  # decisions not yet returned

    # ---- questions

    def alive(self, *phases: str) -> list[Worker]:
        """Return the workers in these phases."""
        return [w for w in self.workers.values() if w.phase in phases]

    @property
    def coming(self) -> list[Worker]:
        """The workers that may get a rank in the next generation."""
        return [w for w in self.alive("starting", "waiting") if not w.unwanted]

    @property
    def need(self) -> int:
        """The minimum number of ranks of the next generation."""
        if self.is_ending:
            return 1
        return self.rules.min_np if self.generation else self.rules.np

    @property
    def is_ending(self) -> bool:
        """Whether the job is ending: no workers are started,
        but the present ones may still form a generation.
        """
        return self.stop is not None or self.done_at is not None

    @property
    def is_broken(self) -> bool:
        """Whether a member of the newest generation is lost, must leave, or waits for the next."""
        return any(
            m not in self.workers or self.workers[m].phase != "running" or self.workers[m].unwanted
            for m in self.members
        )

    @property
    def has_lost_members(self) -> bool:
        """Whether the newest generation can do nothing together any more: a member is lost, or
        waits for the next.
        """
        return any(
            m not in self.workers or self.workers[m].phase != "running" for m in self.members
        )

    @property
    def may_form(self) -> bool:
        """Whether the limits of changes and of failures allow one more generation."""
        limit, failures = self.rules.reset_limit, self.rules.max_failures
        may = (limit is None or self.generation - 1 < limit) and (
            failures is None or len(self.failed) <= failures
        )
        return self.is_ending or may

    @property
    def can_grow(self) -> bool:
        """Whether a worker waits for which the newest generation has room."""
        if not self.may_form or len(self.alive("running")) >= self.rules.most:
            return False
        new = sum(not w.unwanted and not w.replica for w in self.alive("waiting"))
        room = self.rules.most - len(self.alive("running"))
        return min(new, room) >= self.rules.replica_size

    # ---- changes

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self.out.append(Say(text))

    def kill(self, w: Worker, fate: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker a signal that ends it;
        with a `fate` (the text of its report), this counts as a crash.
        """
        w.phase = "ending"
        w.fate = fate
        w.term_at = None
        w.kill_at = self.now + self.rules.term_s
        self.out.append(Send(w.name, number))

    def forward(self, number: signal.Signals, now: float) -> None:
        """Send a signal to all workers, which then have a limited time to end."""
        for w in self.workers.values():
            self.out.append(Send(w.name, number))
            if w.kill_at is None or w.kill_at > now + self.rules.stop_s:
                w.term_at = None
                w.kill_at = now + self.rules.stop_s

    def end(self, code: int | None, why: str) -> None:
        """Declare the job over; workers that join get an answer to end,
        the others get signals after a while.
        """
        if self.over is None:
            self.over = Over(code, why)
            for w in self.workers.values():
                if w.term_at is None and w.kill_at is None:
                    # no rank: nothing to save
                    w.term_at = self.now + (self.rules.end_s if w.assignment is not None else 0.0)

    def lose(self, w: Worker, text: str) -> None:
        """Report a worker that was lost unexpectedly."""
        left = [one for one in self.alive("waiting", "running") if w.name not in one.replica]
        others = sum(other.assignment is not None for other in left)
        if not others:
            rest = "no rank is left"
        elif others < self.need:
            rest = (
                f"{plural(others, 'rank')} {'waits' if others == 1 else 'wait'} for"
                f" {self.need - others} more"
            )
            rest += f" ({self.rules.words.min_np})"
        else:
            rest = f"{plural(others, 'rank')} {'continues' if others == 1 else 'continue'}"
        self.say(f"{w} {text}; {rest}" if w.name in self.members else f"{w} {text}")
        if w.name in self.members:
            self.changes.append((f"{w} {text}", self.now))

    def miss(self, w: Worker) -> None:
        """Note that a worker's host could not be reached:
        it is tried again, for as long as it is one of the job's hosts.
        """
        away = self.away.setdefault(w.host, Away())
        tried = {host for (host, _), slot in self.slots.items() if slot.count}
        if (
            not self.generation
            and tried <= self.away.keys()
            and not self.alive("starting", "waiting")
        ):
            self.end(
                1,
                f"no host can be {self.rules.words.reached} ({', '.join(sorted(tried))}): see the"
                " output above",
            )
        elif away.ready_at <= self.now:  # not another worker of the same try
            first, longest = self.rules.pause_s
            before = away.pause_s
            away.pause_s = min(longest, 2 * away.pause_s) or first
            away.ready_at = self.now + away.pause_s
            if away.pause_s != before:
                self.say(
                    f"{w.host} cannot be {self.rules.words.reached}; it is tried again in"
                    f" {away.pause_s:g} s"
                )

    def count_crash(self, w: Worker, text: str) -> None:
        """Count a worker's crash: its slot is refilled at once, after a pause, or never again."""
        slot = self.slots[w.host, w.slot]
        slot.crashes += 1
        slot.all_crashes += 1
        self.failed |= {self.generation} if w.name in self.members else set()
        tried = [s for s in self.slots.values() if s.count]
        if not self.generation and all(s.crashes for s in tried) and not self.alive("waiting"):
            self.end(
                1, f"no worker got as far as a rank; the last one, {w.name}, {text}: see its output"
            )
        elif slot.crashes >= self.rules.crashes:
            slot.given_up = True
            self.say(
                f"slot {w.slot} of {w.host} is given up: {slot.crashes} crashes without a step in"
                " between"
            )
        elif self.rules.cools_down or slot.crashes > 1:
            first, longest = self.rules.pause_s
            counted = slot.all_crashes if self.rules.cools_down else slot.crashes - 1
            pause = min(longest, first * 2 ** min(counted - 1, _DOUBLINGS))
            slot.ready_at = self.now + pause
            crash = f"{counted}" if self.rules.cools_down else f"{slot.crashes} in a row"
            self.say(f"slot {w.slot} of {w.host} is filled again in {pause:g} s: crash {crash}")
