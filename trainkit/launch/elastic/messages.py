"""What a roster is told at the start (Rules), and what it decides (Start, Send, Say)."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """An elastic job's settings; all times in seconds.

    Attributes:
        np: ranks of the first generation.
        min_np: ranks that every later generation has at least, 1 to np.
        max_np: ranks that a generation has at most, np or more; None: as many as there are slots.
        timeout_s: so long too few workers may be there, or on their way, before the job fails.
        reset_limit: generations after the first at most; None: any number.
        pause_s: the pauses before a slot's worker is replaced a second time, and at the longest.
        leave_s: so long a worker has to leave after its slot was taken away.
        finish_s: so long others may wait in a collective once the first is done, who will not come any more.
        stop_s: so long all have to end after a signal.
        end_s: so long the others have to end after a failure.
        term_s: between SIGTERM and SIGKILL.
        start_s: so long a process has to come to join.
        fresh_s: so long replacements wait for one another where all were lost, and nobody has state to go on with.
        dump_s: between the request for stacks and what follows it.
        crashes: so often a slot may crash while the job's step stands still.
    """

    np: int
    min_np: int
    max_np: int | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    pause_s: tuple[float, float] = (1.0, 60.0)
    leave_s: float = 30.0
    finish_s: float = 30.0
    stop_s: float = 30.0
    end_s: float = 10.0
    term_s: float = 10.0
    start_s: float = 600.0
    fresh_s: float = 10.0
    dump_s: float = 2.0
    crashes: int = 5

    @property
    def most(self) -> float:
        """max_np, or infinity."""
        return float("inf") if self.max_np is None else self.max_np


@dataclass(frozen=True)
class Start:
    """Start a process. `first` counts those of the first generation, from 0; None: it comes later."""

    worker: str
    host: str
    slot: int
    first: int | None


@dataclass(frozen=True)
class Send:
    """Send a signal to a worker and to all that it started."""

    worker: str
    number: signal.Signals


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


Decision = Start | Send | Say


@dataclass(frozen=True)
class Over:
    """How a job ended: horovodrun's exit code, and why."""

    code: int
    why: str
