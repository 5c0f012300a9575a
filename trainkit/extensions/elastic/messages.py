"""The settings of the state machine (Rules, Words), and its decisions (Start, Send, Say)."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from trainkit.extensions.elastic.upstream import WHY


@dataclass(frozen=True)
class Words:
    """The names of a job's options, and of its links to hosts, in its messages;
    by default horovodrun's, and ssh.
    """

    np: str = "-np"
    min_np: str = "--min-np"
    timeout: str = "--elastic-timeout"
    reset_limit: str = "--reset-limit"
    reached: str = "reached by ssh"
    lost: str = "the ssh connection to its host broke, or could not be made"
    unassigned: str = WHY  # why the job ends if its script calls hvd.init() itself


@dataclass(frozen=True)
class Rules:
    """An elastic job's settings; all times in seconds."""

    np: int  # ranks of the first generation
    min_np: int  # minimum number of ranks of later generations, 1 to np
    # maximum number of ranks of a generation, np or more; None: as many as there are slots
    max_np: int | None = None
    # the job fails after this time with too few workers present or starting
    timeout_s: float = 600.0
    reset_limit: int | None = None  # maximum number of generations after the first; None: no limit
    # the pause before the second replacement of a slot's worker in a row, and the longest pause
    pause_s: tuple[float, float] = (1.0, 60.0)
    # pause before the first replacement too, and count each crash, whatever was trained between
    cools_down: bool = False
    leave_s: float = 30.0  # time for a worker to leave after its slot was removed
    # time that workers may wait in a collective after the first one is done, since that one will
    # not join it
    finish_s: float = 30.0
    stop_s: float = 30.0  # time for all workers to end after a signal
    end_s: float = 10.0  # time for the other workers to end after a failure
    term_s: float = 10.0  # time between SIGTERM and SIGKILL
    start_s: float = 600.0  # time for a process to join
    # time that replacements wait for each other if all workers were lost, so that none has state to
    # resume from
    fresh_s: float = 10.0
    dump_s: float = 10.0  # so long an action on a stall waits at most for all stacks
    crashes: int = 5  # maximum number of crashes of a slot while the job's step does not advance
    # maximum number of generations that end by a crash; None: no limit
    max_failures: int | None = None
    # workers that hold the weights together, and get ranks together: what they say when they join
    replica_size: int = 1
    words: Words = Words()

    @property
    def most(self) -> float:
        """max_np, or infinity."""
        return float("inf") if self.max_np is None else self.max_np


@dataclass(frozen=True)
class Start:
    """Start a process. `first` is its number among those of the first generation, from 0;
    None: a later one.
    """

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
    """How a job ended: horovodrun's exit code (None: Horovod's own
    driver takes the job), and the reason.
    """

    code: int | None
    why: str
