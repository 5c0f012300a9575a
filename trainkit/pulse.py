"""Pulse: about once a second all ranks agree, at the same step, on what one of them has noticed.

Who was asked to end by a signal, and what time rank 0's clock shows, travel in one number. How many rounds lie between
two beats is rank 0's to say, from how fast they go by, and travels with them; so nothing is sent in most steps, and all
ranks come to a beat at the same round whatever their clocks show.
"""

from __future__ import annotations

import time

from trainkit.engine.base import Engine
from trainkit.signals import Signals

BEAT_S = 0.5
_MOST_ROUNDS = 255  # between two beats: rounds may grow slower without notice
_ROUNDS_AT, _TIME_AT = 20, 28  # bits: ranks that were signalled, then rank 0's rounds, then its hundredths of a second


class Pulse:
    """See the module.

    Attributes:
        now: seconds since the start by rank 0's clock, as of the last beat; the same on all ranks.
    """

    def __init__(self, engine: Engine, signals: Signals) -> None:
        self._engine, self._signals = engine, signals
        self._started = self._last = time.monotonic()
        self._every, self._rounds = 1, 0
        self.now = 0.0

    def quicken(self) -> None:
        """Beat at the next round: rounds are of another kind from here on. Call it on all ranks."""
        self._every, self._rounds, self._last = 1, 0, time.monotonic()

    def beat(self) -> bool:
        """Count a round; return whether a signal came to any rank. Call it on all ranks, once a round."""
        self._rounds += 1
        if self._rounds < self._every:
            return False
        signalled = int(self._signals.received is not None)
        if self._engine.world_size == 1:
            self.now = time.monotonic() - self._started
            return bool(signalled)
        total = self._engine.sum_number(signalled + (self._say() if self._engine.is_main else 0))
        self._rounds, self._every = 0, (total >> _ROUNDS_AT) & _MOST_ROUNDS
        self.now = (total >> _TIME_AT) / 100
        return bool(total & (1 << _ROUNDS_AT) - 1)

    def _say(self) -> int:
        """Return rank 0's part: the rounds until the next beat, and the time."""
        now = time.monotonic()
        a_round = max(1e-6, (now - self._last) / self._every)
        self._last = now
        rounds = max(1, min(int(BEAT_S / a_round), 2 * self._every, _MOST_ROUNDS))
        return (rounds << _ROUNDS_AT) + (int((now - self._started) * 100) << _TIME_AT)
