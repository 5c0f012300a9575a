"""Worker and Slot: the state machine's record of a job's workers and the slots that they run in."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from trainkit.extensions.elastic.client import RankAssignment

PREEMPTED = 75  # trainkit.errors.Preempted; sysexits' EX_TEMPFAIL


@dataclass
class Worker:
    """A live process."""

    name: str  # "host/slot#count"
    host: str
    slot: int
    born: float  # start of its process
    # starting: has not joined; waiting: for a rank; running: has one; ending: asked to end, or
    # killed
    phase: Literal["starting", "waiting", "running", "ending"] = "starting"
    commit: int = -1  # the newest step in its memory, -1 for none
    came: int = 0  # its number among all workers that ever joined
    assignment: RankAssignment | None = None  # its last rank
    # names of the workers that hold the weights together with it, in the order of their ranks;
    # empty before its first rank, and where each holds all weights
    replica: tuple[str, ...] = ()
    broken: str = ""  # why it cannot work with those any more; "" if it can
    joined: float = 0.0  # start of its current wait
    unwanted: str = ""  # why it must leave; "" if it need not
    fate: str = ""  # why it was killed; "" if it was not
    step: int = -1
    progress: int = -1
    waiting: str = ""
    stall_s: float | None = None
    heard: float = 0.0  # time of its last sign of life, 0 before the first
    moved: float = 0.0  # time of its main thread's last progress
    # the step from which its generation resumed; beyond it, the worker has made progress
    entered: int = 0
    raised: bool = False  # whether it has reported an exception of the code that it runs
    # its stacks: wanted, then requested; "" again when a heartbeat after the request says that they
    # are written
    dump: Literal["", "wanted", "requested"] = ""
    term_at: float | None = None  # time at which it gets SIGTERM
    kill_at: float | None = None  # time at which it gets SIGKILL

    @property
    def got_on(self) -> bool:
        """Whether it has taken a step in its generation."""
        return self.assignment is not None and self.step > self.entered

    def __str__(self) -> str:
        if self.assignment is None:
            return f"worker {self.name}"
        return f"rank {self.assignment.rank} ({self.host}, slot {self.slot})"

    def shift(self, gap: float) -> None:
        """Skip a period in which the driver itself did not run."""
        self.born += gap
        self.joined += gap
        self.heard += gap if self.heard else 0.0
        self.moved += gap


@dataclass
class Slot:
    """A place for one process on a host."""

    count: int = 0  # processes started here
    crashes: int = 0  # consecutive crashes of workers that took no step of their own
    all_crashes: int = 0
    ready_at: float = 0.0  # time from which it may be filled again
    given_up: bool = False  # whether it crashed too often
    left: bool = False  # whether its last worker left voluntarily

    def __str__(self) -> str:
        if self.given_up:
            return f"was given up after {self.crashes} crashes"
        if self.left:
            return "was left by its worker"
        return f"crashed {self.crashes} times in a row" if self.crashes else ""

    @property
    def is_pending(self) -> bool:
        """Whether it will be filled again soon, without an event."""
        return not self.left and not self.given_up

    def forget(self) -> None:
        """Reset: the host was removed, and came back."""
        self.crashes = self.all_crashes = 0
        self.ready_at = 0.0
        self.given_up = self.left = False


@dataclass
class Away:
    """A host to which no connection can be made."""

    pause_s: float = 0.0  # between the last two tries, growing
    ready_at: float = 0.0  # time of the next one


def describe(code: int | None, lost: str) -> str:
    """Describe how a process ended:
    exit code, minus a signal's number, or None for a lost connection, described by `lost`.
    """
    if code is None:
        return f"was lost: {lost}"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def shell_code(code: int | None) -> int:
    """Return the exit code that a shell would show:
    128 + a signal's number, 255 for a lost connection.
    """
    if code is None:
        return 255
    return code if code >= 0 else 128 - code
