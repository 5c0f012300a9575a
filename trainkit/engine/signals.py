"""Signals that end a run: SIGTERM (schedulers, launchers), SIGUSR1 (Slurm's --signal=USR1@60),
SIGINT (Ctrl-C).

The first one is recorded; the run ends at the next step with a checkpoint (run/stopping.py). A
second one stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# torchrun forwards a Ctrl-C that its ranks have already received: a signal this soon after the
# first is the same one.
_SAME_S = 1.0


class Signals:
    """Records the first signal within its context, which may be nested. Does nothing outside the
    main thread.

    Attributes:
        received: the name of the received signal, as "SIGTERM", or the words of another notice
            (Coordinator.preempt), or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._depth = 0

    def __enter__(self) -> Signals:
        self._depth += 1
        if self._depth > 1:
            return self
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup it stays ignored
                    self._before[number] = signal.signal(number, self._note)
            # those that have waited (launch/slurm/step.py) arrive here
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth < 1:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def raise_again(self) -> None:
        """Raise the recorded signal again, with its own handler. Call it outside the context."""
        if self.received is not None and self.received in signal.Signals.__members__:
            os.kill(os.getpid(), signal.Signals[self.received])

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._when = signal.Signals(number).name, now
        elif now - self._when > _SAME_S:
            self._restore()
            os.kill(os.getpid(), number)
