"""Coordinator: about twice a second all ranks learn, at the same step, of an event on one of them.

One number carries it: how many ranks received a signal, and from rank 0 the answers of those that
registered a question (the elastic launcher requests other ranks; a recording was requested), the
rounds until the next exchange, and rank 0's clock. A round is a training step or a validation
batch. Rank 0 sets the distance from the measured duration of a round, so most steps send nothing,
and all ranks exchange at the same round whatever their clocks show.

No rank waits for an exchange: it starts between two rounds, travels beside the next, and is read
after it. If rounds are long, or their duration is not known yet, it is read at once: one more round
would be late, and the wait is a small part of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.engine.base import Engine
from trainkit.engine.signals import Signals

INTERVAL_S = 0.5
LONG_ROUND_S = 2.0
_MAX_ROUNDS = 255  # between two exchanges: rounds may become slower without notice
_MAX_QUESTIONS = 4
# Bits: signalled ranks, then rank 0's rounds, answers and hundredths of a second (31 bits of an
# int64: 248 days).
_ROUNDS_AT = 20
_ANSWERS_AT = 28
_TIME_AT = _ANSWERS_AT + _MAX_QUESTIONS


class Question:
    """A question that rank 0 answers at each exchange.

    Attributes:
        latest: rank 0's answer at the last exchange; the same on all ranks.
        agreed: set after an answer was yes; the same on all ranks. Its user clears it.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.ask = ask
        self.latest = self.agreed = False


class Coordinator:
    """See the module.

    Attributes:
        now: seconds since the start by rank 0's clock, as of the last exchange; the same on all
            ranks.
        num_signalled: ranks that had received a signal at the last exchange.
        includes_this_rank: whether this rank was one of them; a signal after the exchange began
            does not count.
    """

    def __init__(self, engine: Engine, signals: Signals) -> None:
        self._engine = engine
        self._signals = signals
        self._started = self._last = time.monotonic()
        self._every = 1
        self._rounds = 0
        self._wait: Callable[[], int] | None = None  # of the exchange in flight
        self._reported = False  # in that exchange: this rank received a signal
        # whether exchanges are read at once; the same on all ranks, as the next two are
        self._is_long = True
        # the last one's time by rank 0's clock, if rounds are still of that kind
        self._sent_at: float | None = None
        self._counted = 1  # the rounds before it
        self._questions: dict[str, Question] = {}
        self.now = 0.0
        self.num_signalled = 0
        self.includes_this_rank = False
        self._change = Question(lambda: engine.ranks.change_requested)
        if engine.ranks.is_elastic:
            self._questions["ranks"] = self._change

    def register(self, name: str, ask: Callable[[], bool]) -> Question:
        """Ask rank 0 at each exchange from now on; `ask` must be cheap. A question of the same name
        is replaced.

        Call it on all ranks, in the same order.
        """
        question = self._questions[name] = Question(ask)
        assert len(self._questions) <= _MAX_QUESTIONS, "make room in the number: see _MAX_QUESTIONS"
        return question

    def preempt(self, notice: str) -> None:
        """Count this rank as signalled by a notice of another kind than a signal;
        `notice` names it for the user.
        """
        self._signals.received = self._signals.received or notice

    @property
    def ranks_change(self) -> bool:
        """Whether the launcher requested other ranks at the last exchange."""
        return self._change.latest

    def expect_new_pace(self) -> None:
        """Exchange at the next round: the length of rounds changes here. Call it on all ranks."""
        self.settle()
        self._every = 1
        self._rounds = 0
        self._last = time.monotonic()
        self._is_long = True
        self._sent_at = None

    def settle(self) -> None:
        """Wait for the exchange in flight, if any. Call it on all ranks."""
        if self._wait is not None:
            wait = self._wait
            self._wait = None
            self._read(wait())

    def sync_clock(self) -> float:
        """Update `now` by a message of its own and return it. Call it on all ranks."""
        self.now = float(self._engine.comm.broadcast_object(time.monotonic() - self._started))
        return self.now

    def count_round(self) -> bool:
        """Count a round; return whether a rank received a signal, or ranks change.
        Call it on all ranks, once a round.
        """
        self._rounds += 1
        if self._wait is not None:
            self.settle()
            if self._must_act:
                return True
        if self._rounds < self._every:
            return False
        self._reported = self._signals.received is not None
        if self._engine.ranks.world_size == 1:
            self.now = time.monotonic() - self._started
            self.num_signalled = int(self._reported)
            self.includes_this_rank = self._reported
            for question in self._questions.values():
                question.latest = question.ask()
                question.agreed = question.agreed or question.latest
            return self._reported or self._change.latest
        self._wait = self._engine.comm.start_sum(
            self._reported + (self._of_rank_0() if self._engine.ranks.is_main else 0)
        )
        self._counted = self._rounds
        self._rounds = 0
        if not self._is_long:
            return False
        self.settle()
        return self._must_act

    @property
    def _must_act(self) -> bool:
        return bool(self.num_signalled) or self.ranks_change

    def _of_rank_0(self) -> int:
        """Return rank 0's part: the rounds until the next exchange, the answers, and the time."""
        now = time.monotonic()
        round_s = max(1e-6, (now - self._last) / self._rounds)
        self._last = now
        rounds = max(1, min(int(INTERVAL_S / round_s), 2 * self._every, _MAX_ROUNDS))
        answers = sum(
            int(question.ask()) << i for i, question in enumerate(self._questions.values())
        )
        return (
            (rounds << _ROUNDS_AT)
            + (answers << _ANSWERS_AT)
            + (int((now - self._started) * 100) << _TIME_AT)
        )

    def _read(self, total: int) -> None:
        self._every = (total >> _ROUNDS_AT) & _MAX_ROUNDS
        sent_at = (total >> _TIME_AT) / 100
        if self._sent_at is not None:
            self._is_long = (sent_at - self._sent_at) / self._counted > LONG_ROUND_S
        self._sent_at = sent_at
        self.now = max(self.now, sent_at)
        self.num_signalled = total & (1 << _ROUNDS_AT) - 1
        self.includes_this_rank = self._reported
        for i, question in enumerate(self._questions.values()):
            question.latest = bool(total >> _ANSWERS_AT + i & 1)
            question.agreed = question.agreed or question.latest
