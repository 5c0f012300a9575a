"""The settings of the state machine (Rules), and its decisions (Start, Send, Say)."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """An elastic job's settings; all times in seconds.

    Attributes:
        np: ranks of the first generation.
        min_np: minimum number of ranks of later generations, 1 to np.
        max_np: maximum number of ranks of a generation, np or more; None: as many as there are slots.
        timeout_s: the job fails after this time with too few workers present or starting.
        reset_limit: maximum number of generations after the first; None: no limit.
        pause_s: the pause before the second replacement of a slot's worker, and the longest pause.
        leave_s: time for a worker to leave after its slot was removed.
        finish_s: time that workers may wait in a collective after the first one is done, since that one will not join it.
        stop_s: time for all workers to end after a signal.
        end_s: time for the other workers to end after a failure.
        term_s: time between SIGTERM and SIGKILL.
        start_s: time for a process to join.
        fresh_s: time that replacements wait for each other if all workers were lost, so that none has state to resume from.
        dump_s: time between the request for stacks and the action on a stall.
        crashes: maximum number of crashes of a slot while the job's step does not advance.
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
    """Start a process. `first` is its number among those of the first generation, from 0; None: a later one."""

    worker: str
    host: str
    slot: int
    first: int | None


@dataclass(frozen=True)
class Send:
    """Send a signal to a worker and all its child processes."""

    worker: str
    number: signal.Signals


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    text: str


Decision = Start | Send | Say


@dataclass(frozen=True)
class Over:
    """How a job ended: horovodrun's exit code, and the reason."""

    code: int
    why: str
