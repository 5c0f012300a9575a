"""What is known of an elastic job, and the small changes that events and decisions have in common."""

from __future__ import annotations

import signal

from trainkit.console import plural
from trainkit.launch.elastic.messages import Decision, Over, Rules, Say, Send
from trainkit.launch.elastic.stalls import Stall
from trainkit.launch.elastic.workers import Slot, Worker


class Job:
    """One job's workers, slots and generation.

    Attributes:
        generation: the newest one's number, 0 before the first.
        over: how the job ended; None while it goes on. Its processes may outlive that.
        workers: those whose processes live, by name.
        hosts: slots by host, in the order in which they are filled.
        slots: by host and number, those of hosts that are gone included.
        members: those of the newest generation, less those that are done.
        changes: what has happened since the newest generation was formed, and when.
        short_s: so long too few workers were there since a generation was last formed.
        stop: the signal that ends the job.
        codes: exit codes since that signal, of workers that ever had a seat.
        done_at: when the first worker was done.
        main_code: exit code of rank 0 of the newest generation, once it has ended.
        preempted: whether the last that was lost had left by its own will.
        stall: what is known to hold up the job, and when something is done about it.
        out: decisions that are yet to be handed out.
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.now = now
        self.generation = 0
        self.over: Over | None = None
        self.workers: dict[str, Worker] = {}
        self.hosts: dict[str, int] = {}
        self.slots: dict[tuple[str, int], Slot] = {}
        self.members: set[str] = set()
        self.changes: list[tuple[str, float]] = []
        self.short_s = 0.0
        self.stop: signal.Signals | None = None
        self.codes: list[int] = []
        self.done_at: float | None = None
        self.main_code: int | None = None
        self.preempted = False
        self.stall: tuple[Stall, float] | None = None
        self.out: list[Decision] = []

    # ---- questions

    def alive(self, *phases: str) -> list[Worker]:
        """Return the workers in these phases."""
        return [w for w in self.workers.values() if w.phase in phases]

    @property
    def coming(self) -> list[Worker]:
        """Those that may have a seat in the next generation."""
        return [w for w in self.alive("starting", "waiting") if not w.unwanted]

    @property
    def need(self) -> int:
        """Ranks that the next generation has at least."""
        if self.is_ending:
            return 1
        return self.rules.min_np if self.generation else self.rules.np

    @property
    def is_ending(self) -> bool:
        """Whether the job comes to its end: nobody new is started, but those that are there may still form a generation."""
        return self.stop is not None or self.done_at is not None

    @property
    def is_broken(self) -> bool:
        """Whether a member of the newest generation is lost, is to leave, or waits for the next."""
        return any(
            m not in self.workers or self.workers[m].phase != "running" or self.workers[m].unwanted for m in self.members
        )

    @property
    def may_form(self) -> bool:
        """Whether --reset-limit leaves room for one more generation."""
        return self.is_ending or self.rules.reset_limit is None or self.generation - 1 < self.rules.reset_limit

    @property
    def can_grow(self) -> bool:
        """Whether somebody waits for whom the newest generation had room."""
        if not self.may_form or len(self.alive("running")) >= self.rules.most:
            return False
        return any(not w.unwanted for w in self.alive("waiting"))

    # ---- changes

    def say(self, text: str) -> None:
        """Tell the user."""
        self.out.append(Say(text))

    def kill(self, w: Worker, fate: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a worker a signal that ends it; with a `fate`, what is said of it, that counts as a crash."""
        w.phase, w.fate = "ending", fate
        w.term_at, w.kill_at = None, self.now + self.rules.term_s
        self.out.append(Send(w.name, number))

    def forward(self, number: signal.Signals, now: float) -> None:
        """Send a signal to all, which they have to follow in time."""
        for w in self.workers.values():
            self.out.append(Send(w.name, number))
            if w.kill_at is None or w.kill_at > now + self.rules.stop_s:
                w.term_at, w.kill_at = None, now + self.rules.stop_s

    def end(self, code: int, why: str) -> None:
        """The job is over; whoever lives is told so when it comes, and sent signals when it does not."""
        if self.over is None:
            self.over = Over(code, why)
            for w in self.workers.values():
                if w.term_at is None and w.kill_at is None:
                    w.term_at = self.now + (self.rules.end_s if w.seat is not None else 0.0)  # else it has nothing to save

    def lose(self, w: Worker, text: str) -> None:
        """A worker is gone that was not meant to go."""
        others = sum(other.seat is not None for other in self.alive("waiting", "running"))
        if not others:
            rest = "no rank is left"
        elif others < self.need:
            rest = f"{plural(others, 'rank')} {'waits' if others == 1 else 'wait'} for {self.need - others} more (--min-np)"
        else:
            rest = f"{plural(others, 'rank')} {'goes' if others == 1 else 'go'} on"
        self.say(f"{w} {text}; {rest}" if w.name in self.members else f"{w} {text}")
        if w.name in self.members:
            self.changes.append((f"{w} {text}", self.now))

    def count_crash(self, w: Worker, text: str) -> None:
        """A worker crashed: its slot is filled again at once, after a pause, or no more."""
        slot = self.slots[w.host, w.slot]
        slot.crashes += 1
        tried = [s for s in self.slots.values() if s.count]
        if not self.generation and all(s.crashes for s in tried) and not self.alive("waiting"):
            self.end(1, f"no worker came so far as to have a seat; the last, {w.name}, {text}: see what it printed")
        elif slot.crashes >= self.rules.crashes:
            slot.given_up = True
            self.say(f"slot {w.slot} of {w.host} is given up: {slot.crashes} crashes, and no step in between")
        elif slot.crashes > 1:
            first, longest = self.rules.pause_s
            pause = min(longest, first * 2 ** (slot.crashes - 2))
            slot.ready_at = self.now + pause
            self.say(f"slot {w.slot} of {w.host} is filled again in {pause:g} s: crash {slot.crashes} in a row")
