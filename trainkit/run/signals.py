"""Signals that ask a run to end: SIGTERM (schedulers, launchers), SIGUSR1 (Slurm's --signal=USR1@60), SIGINT (Ctrl-C).

The first one is noted; the run ends at the next step with a checkpoint (pulse.py, fitting.py). A second one stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# torchrun hands on a Ctrl-C that its ranks have had already: what follows this soon is the same wish.
_SAME_S = 1.0


class Signals:
    """Notes the first signal while it is entered; a context manager, also within itself. Does nothing outside the main thread.

    Attributes:
        received: the name of the signal that came, as "SIGTERM", or None.
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
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: whoever ignores one goes on doing so
                    self._before[number] = signal.signal(number, self._note)
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
        """Let the signal that was noted do what it would have done. Call it outside the context."""
        if self.received is not None:
            os.kill(os.getpid(), signal.Signals[self.received])

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._when = signal.Signals(number).name, now
        elif now - self._when > _SAME_S:
            self._restore()
            os.kill(os.getpid(), number)
