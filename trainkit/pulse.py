"""Pulse: about once a second all ranks agree, at the same step, on what one of them has noticed.

Who was asked to end by a signal, and from rank 0 whether an elastic launcher asks for other ranks, whether a callback there
wishes for something, and what time its clock shows, travel in one number. How many rounds lie between
two beats is rank 0's to say, from how fast they go by, and travels with them; so nothing is sent in most steps, and all
ranks come to a beat at the same round whatever their clocks show.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainkit.engine.base import Engine
from trainkit.signals import Signals

BEAT_S = 0.5
_MOST_ROUNDS = 255  # between two beats: rounds may grow slower without notice
# Bits: ranks that were signalled, then rank 0's rounds, whether ranks change, its wish, and its hundredths of a second.
_ROUNDS_AT, _CHANGE_AT, _WISH_AT, _TIME_AT = 20, 28, 29, 30


class Pulse:
    """See the module.

    Attributes:
        now: seconds since the start by rank 0's clock, as of the last beat; the same on all ranks.
        signalled: ranks that had been signalled at the last beat.
        ranks_change: whether the launcher asked for other ranks at the last beat.
        wish: asked on rank 0 at each beat: whether all ranks are to do something at the same step (Timeline: record).
        wished: set on all ranks by a beat at which it was so; whoever does it clears it.
    """

    def __init__(self, engine: Engine, signals: Signals) -> None:
        self._engine, self._signals = engine, signals
        self._started = self._last = time.monotonic()
        self._every, self._rounds = 1, 0
        self.now = 0.0
        self.signalled, self.ranks_change = 0, False
        self.wish: Callable[[], bool] = bool
        self.wished = False

    def quicken(self) -> None:
        """Beat at the next round: rounds are of another kind from here on. Call it on all ranks."""
        self._every, self._rounds, self._last = 1, 0, time.monotonic()

    def look(self) -> float:
        """Bring `now` up to date and return it: a message of its own, for a moment that counts. Call it on all ranks."""
        self.now = float(self._engine.broadcast_object(time.monotonic() - self._started))
        return self.now

    def beat(self) -> bool:
        """Count a round; return whether a signal came to any rank, or ranks change. Call it on all ranks, once a round."""
        self._rounds += 1
        if self._rounds < self._every:
            return False
        signalled = int(self._signals.received is not None)
        if self._engine.world_size == 1:
            self.now = time.monotonic() - self._started
            self.signalled, self.ranks_change = signalled, self._engine.ranks_change
            self.wished = self.wished or self.wish()
            return bool(signalled) or self.ranks_change
        total = self._engine.sum_number(signalled + (self._say() if self._engine.is_main else 0))
        self._rounds, self._every = 0, (total >> _ROUNDS_AT) & _MOST_ROUNDS
        self.now = (total >> _TIME_AT) / 100
        self.signalled, self.ranks_change = total & (1 << _ROUNDS_AT) - 1, bool(total >> _CHANGE_AT & 1)
        self.wished = self.wished or bool(total >> _WISH_AT & 1)
        return bool(self.signalled) or self.ranks_change

    def _say(self) -> int:
        """Return rank 0's part: the rounds until the next beat, and the time."""
        now = time.monotonic()
        a_round = max(1e-6, (now - self._last) / self._every)
        self._last = now
        rounds = max(1, min(int(BEAT_S / a_round), 2 * self._every, _MOST_ROUNDS))
        asks = (int(self._engine.ranks_change) << _CHANGE_AT) + (int(self.wish()) << _WISH_AT)
        return (rounds << _ROUNDS_AT) + asks + (int((now - self._started) * 100) << _TIME_AT)
