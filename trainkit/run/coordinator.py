"""Pulse: about twice a second all ranks agree, at the same step, on what one of them has noticed.

Who was asked to end by a signal, and from rank 0 whether an elastic launcher asks for other ranks, whether a callback there
wishes for something, and what time its clock shows, travel in one number. How many rounds lie between
two beats is rank 0's to say, from how fast they go by, and travels with them; so nothing is sent in most steps, and all
ranks come to a beat at the same round whatever their clocks show.

Nobody waits for a beat: it is sent between two rounds, travels beside the next, and is read behind that. Where rounds take
long, or their duration is not known yet, it is read at once: a round more would be late, and the wait is a small part of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.engine.base import Engine
from trainkit.run.signals import Signals

BEAT_S = 0.5
LONG_ROUND_S = 2.0
_MOST_ROUNDS = 255  # between two beats: rounds may grow slower without notice
# Bits: ranks that were signalled, then rank 0's rounds, whether ranks change, its wish, and its hundredths of a second.
_ROUNDS_AT, _CHANGE_AT, _WISH_AT, _TIME_AT = 20, 28, 29, 30


class Pulse:
    """See the module.

    Attributes:
        now: seconds since the start by rank 0's clock, as of the last beat; the same on all ranks.
        signalled: ranks that had been signalled at the last beat.
        is_among_them: whether this rank was; a signal that came after the beat was sent does not count.
        ranks_change: whether the launcher asked for other ranks at the last beat.
        wish: asked on rank 0 at each beat: whether all ranks are to do something at the same step (Timeline: record).
        wished: set on all ranks by a beat at which it was so; whoever does it clears it.
    """

    def __init__(self, engine: Engine, signals: Signals) -> None:
        self._engine, self._signals = engine, signals
        self._started = self._last = time.monotonic()
        self._every, self._rounds = 1, 0
        self._wait: Callable[[], int] | None = None  # for the beat that is under way
        self._told = False  # that beat, that this rank was signalled
        self._is_long = True  # whether beats are read at once; the same on all ranks, as the next two are
        self._sent_at: float | None = None  # the last one's time by rank 0's clock, where rounds are still of that kind
        self._counted = 1  # the rounds before it
        self.now = 0.0
        self.signalled, self.is_among_them, self.ranks_change = 0, False, False
        self.wish: Callable[[], bool] = bool
        self.wished = False

    def quicken(self) -> None:
        """Beat at the next round: rounds are of another kind from here on. Call it on all ranks."""
        self.settle()
        self._every, self._rounds, self._last = 1, 0, time.monotonic()
        self._is_long, self._sent_at = True, None

    def settle(self) -> None:
        """Wait for the beat that is under way, if any. Call it on all ranks."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            self._read(wait())

    def look(self) -> float:
        """Bring `now` up to date and return it: a message of its own, for a moment that counts. Call it on all ranks."""
        self.now = float(self._engine.comm.broadcast_object(time.monotonic() - self._started))
        return self.now

    def beat(self) -> bool:
        """Count a round; return whether a signal came to any rank, or ranks change. Call it on all ranks, once a round."""
        self._rounds += 1
        if self._wait is not None:
            self.settle()
            if self._has_come:
                return True
        if self._rounds < self._every:
            return False
        self._told = self._signals.received is not None
        if self._engine.ranks.world_size == 1:
            self.now = time.monotonic() - self._started
            self.signalled, self.is_among_them, self.ranks_change = (
                int(self._told),
                self._told,
                self._engine.ranks.change_requested,
            )
            self.wished = self.wished or self.wish()
            return self._has_come
        self._wait = self._engine.comm.start_sum(self._told + (self._say() if self._engine.ranks.is_main else 0))
        self._counted, self._rounds = self._rounds, 0
        if not self._is_long:
            return False
        self.settle()
        return self._has_come

    @property
    def _has_come(self) -> bool:
        return bool(self.signalled) or self.ranks_change

    def _say(self) -> int:
        """Return rank 0's part: the rounds until the next beat, and the time."""
        now = time.monotonic()
        a_round = max(1e-6, (now - self._last) / self._rounds)
        self._last = now
        rounds = max(1, min(int(BEAT_S / a_round), 2 * self._every, _MOST_ROUNDS))
        asks = (int(self._engine.ranks.change_requested) << _CHANGE_AT) + (int(self.wish()) << _WISH_AT)
        return (rounds << _ROUNDS_AT) + asks + (int((now - self._started) * 100) << _TIME_AT)

    def _read(self, total: int) -> None:
        self._every, sent_at = (total >> _ROUNDS_AT) & _MOST_ROUNDS, (total >> _TIME_AT) / 100
        if self._sent_at is not None:
            self._is_long = (sent_at - self._sent_at) / self._counted > LONG_ROUND_S
        self._sent_at, self.now = sent_at, max(self.now, sent_at)
        self.signalled, self.is_among_them = total & (1 << _ROUNDS_AT) - 1, self._told
        self.ranks_change = bool(total >> _CHANGE_AT & 1)
        self.wished = self.wished or bool(total >> _WISH_AT & 1)
