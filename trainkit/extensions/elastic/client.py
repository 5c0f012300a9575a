"""A worker's membership in an elastic job: it requests its rank from the driver
(driver.py) and sends heartbeats.

    Membership.current() -> join(commit) -> RankAssignment        requests a rank until it gets one, or the job ends
                        a thread, every 0.5 s (beat_s)      reports step, progress and what the main thread waits for;
                                                    receives whether the driver wants to form a new
                                                    generation

A generation is a set of workers with their ranks. It ends if a worker is lost or leaves, or a new
one arrives: the others then join again. Requests are JSON over HTTP, signed (signing.py). No torch,
no Horovod.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainkit.console import what_waits
from trainkit.errors import Dismissed, JobEnded
from trainkit.extensions.elastic.connections import SignedConnection
from trainkit.extensions.elastic.signing import SECRET
from trainkit.safety.threads import printed, start_thread

BEAT_S = 0.5  # seconds between two heartbeats
UNREACHABLE_S = 60.0  # a driver silent for longer counts as gone, and the job as over
_BURSTS_S = 0.125  # seconds between two bursts of heartbeats
_RANKS_AT_ONCE = 128  # of a larger job each one beats less often
_POLL_S = 30.0  # a join is answered within 10 s
_PAUSE_S = 0.2  # between two attempts to reach the driver
_PARTING_S = 60.0  # time limit for a process's exit, during which no Python thread runs


def beat_s(ranks: int, stall_s: float | None = None) -> float:
    """Return the seconds between two heartbeats of a worker, so that those of a large job take no
    more of the driver than those of `_RANKS_AT_ONCE` do, and none counts as frozen for it.

    Args:
        ranks: of its generation; 0 before its first.
        stall_s: seconds after which a silent worker counts as frozen; None: never.
    """
    longest = float("inf") if stall_s is None else stall_s / 4
    return max(BEAT_S, min(BEAT_S * ranks / _RANKS_AT_ONCE, longest))


def until_beat_s(interval_s: float, now: float) -> float:
    """Return the seconds until a worker's next heartbeat, which come in bursts: the driver's
    processor, if it slept before each of them, would take two to three times as long for it.

    Args:
        interval_s: from now, to the nearest burst.
        now: by the clock that hosts share.
    """
    between_s = min(_BURSTS_S, interval_s / 4)
    return between_s * round((now + interval_s) / between_s) - now


@dataclass(frozen=True)
class RankAssignment:
    """A worker's rank in a generation, in Horovod's numbering."""

    generation: int  # number of the generation, from 1, increasing
    rank: int  # rank among all, from 0; rank 0 has the newest commit
    size: int  # number of ranks
    local_rank: int  # rank on its host, from 0
    local_size: int  # number of ranks on its host
    cross_rank: int  # rank among those with the same local rank, one per host, from 0
    cross_size: int  # number of hosts that have this local rank

    def environment(self) -> dict[str, str]:
        """Return the variables that hvd.init() reads."""
        numbers = dataclasses.asdict(self)
        generation = numbers.pop("generation")
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in numbers.items()} | {
            "HOROVOD_RENDEZVOUS_SCOPE": f"g{generation}."
        }


@dataclass(frozen=True)
class DriverLink:
    """The driver's server, as a worker reaches it."""

    address: tuple[str, int]
    secret: str

    def connect(self, timeout_s: float = _POLL_S) -> SignedConnection:
        """Return a connection, which opens with its first request; close it."""
        return SignedConnection(self.address, self.secret, timeout_s)

    def ask(
        self, connection: SignedConnection, target: str, content: dict[str, Any]
    ) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            OSError, http.client.HTTPException: there is none.
            JobEnded: the driver refuses the request.
        """
        status, text = connection.post(target, content)
        if status != http.client.OK:
            raise JobEnded(
                f"The elastic driver at {self.address[0]}:{self.address[1]} answered {status} "
                f"{http.client.responses.get(status, '')} to {target} of worker"
                f" {content.get('worker')}: {text.decode(errors='replace')[:200]}"
            )
        answer: dict[str, Any] = json.loads(text)
        return answer

    def silent(self, worker: str, error: Exception) -> str:
        """Return what a worker says that cannot reach the driver any more."""
        host, port = self.address
        return (
            f"The elastic driver at {host}:{port} could not be reached for {UNREACHABLE_S:g} s"
            f" ({error}): it was killed, or its host is gone. Worker {worker} ends;"
            " start the job again to resume from its newest checkpoint."
        )


class Membership:
    """One worker's link to its driver."""

    _current: ClassVar[Membership | None] = None

    def __init__(self, worker: str, address: tuple[str, int], secret: str) -> None:
        self.worker = worker  # this process's name at the driver: "node1/0#3" is host, slot, count
        self.generation = 0  # generation of the last rank, 0 before the first
        self.ranks = 0  # of that generation
        self.step = 0  # the loop's current optimizer step
        self.progress = 0  # a counter that increases while the main thread makes progress
        self.waiting = ""  # the collective in which the main thread waits, "" if it is in none
        self.fits = 0  # number of fits that this process has begun
        # returns the names of the tensors waiting in it; called from the heartbeat thread
        self.tensors: Callable[[], list[str]] = list
        # seconds after which a worker without progress counts as hung; None: never
        self.stall_s: float | None = None
        # called from the heartbeat thread when the driver requests the stacks of all threads
        self.on_dump: Callable[[], None] | None = None
        # called from the heartbeat thread when the main thread waits for ranks that are gone
        self.on_broken: Callable[[], None] | None = None
        self.raised = False  # whether the code that this process runs has raised an exception
        self.why = ""  # why the driver wants to form a new generation, "" if it does not
        self.link = DriverLink(address, secret)
        self._asked = 0  # the generation that the driver wants
        self._is_stuck = False  # whether it waited for ranks that are gone at the last heartbeat
        # start of the current series of failed requests; None: the last one succeeded
        self._silent: float | None = None
        self._thread: threading.Thread | None = None
        self._parting = threading.Event()

    @classmethod
    def current(cls) -> Membership | None:
        """Return this process's membership, created from the environment at the first call;
        None outside an elastic job.
        """
        if cls._current is None and "TRAINKIT_WORKER" in os.environ:
            cls._current = cls.of(os.environ)
        return cls._current

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Membership:
        """Create a membership from the variables that the driver sets for a worker.

        Raises:
            JobEnded: a variable is missing or invalid.
        """
        try:
            address = (
                environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
                int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
            )
            return cls(environ["TRAINKIT_WORKER"], address, environ[SECRET])
        except (KeyError, ValueError) as error:
            raise JobEnded(
                "TRAINKIT_WORKER says that this process belongs to an elastic job, but its driver"
                f" cannot be found: {error!r}. Start it with horovodrun --min-np or `python -m trainkit"
                " launch`, and pass the"
                " environment on unchanged."
            ) from None

    @property
    def wanted(self) -> bool:
        """Return whether to call join() at the next opportunity:
        the driver requests it, or is gone.
        """
        return self._asked > self.generation or self._is_lost()

    def beat(self) -> None:
        """Start the heartbeat thread: preparations before the first join may take long."""
        if self._thread is None:
            self._thread = start_thread(
                "membership", self._send_beats, printed("The heartbeats continue.", retry_s=BEAT_S)
            )
            atexit.register(self._part, os.getpid())

    def join(
        self, commit: int, replica_size: int = 1, is_whole: bool = True, copies: int = 0
    ) -> RankAssignment:
        """Request a rank in the next generation, and wait for it.

        Args:
            commit: the newest step with its state in this worker's memory, -1 for none.
            replica_size: ranks that hold the weights together; they get ranks together.
            is_whole: whether this worker's can still work together.
            copies: hosts whose memory holds a copy of this worker's state.

        Raises:
            Dismissed: the driver does not need this worker any more.
            JobEnded: the job is over, or the driver cannot be reached.
        """
        self.beat()
        request = {"worker": self.worker, "commit": commit, "generation": self.generation}
        request |= {"replica_size": replica_size, "is_whole": is_whole, "copies": copies}
        while True:
            answer = self._ask(request)
            if answer["answer"] == "rank":
                assignment = RankAssignment(
                    **{
                        field.name: int(answer[field.name])
                        for field in dataclasses.fields(RankAssignment)
                    }
                )
                self.generation, self.ranks = assignment.generation, assignment.size
                self.why = ""
                return assignment
            if answer["answer"] == "leave":
                raise Dismissed(str(answer["why"]))
            if answer["answer"] == "end":
                raise JobEnded(str(answer["why"]), is_reported=True)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        while True:
            connection = self.link.connect()
            try:
                return self._post(connection, "/elastic/join", request)
            except (OSError, http.client.HTTPException) as error:
                self._note_silence()
                if self._is_lost():
                    raise JobEnded(self.link.silent(self.worker, error)) from None
            finally:
                connection.close()
            time.sleep(_PAUSE_S)

    def _post(
        self, connection: SignedConnection, target: str, content: dict[str, Any]
    ) -> dict[str, Any]:
        answer = self.link.ask(connection, target, content)
        self._silent = None
        return answer

    def _send_beats(self) -> None:
        with contextlib.closing(self.link.connect()) as connection:
            while not self._parting.is_set():
                try:
                    answer = self._beat_once(connection)
                except (OSError, http.client.HTTPException, JobEnded):
                    self._note_silence()
                    connection.close()  # the next request reopens it
                else:
                    self._obey(answer)
                is_calm = self._asked <= self.generation and not self._is_stuck
                interval_s = beat_s(self.ranks, self.stall_s) if is_calm else BEAT_S
                self._parting.wait(until_beat_s(interval_s, time.time()))

    def _obey(self, answer: dict[str, Any]) -> None:
        # the driver's loop is busy, as with the start of many workers
        if answer.get("answer") == "wait":
            return
        self._asked, self.why = int(answer["wanted"]), str(answer["why"])
        if answer["dump"] and self.on_dump is not None:
            self.on_dump()
        # Twice in a row: where a process ends, the others' errors come by themselves.
        was_stuck = self._is_stuck
        self._is_stuck = bool(answer["broken"] and self.waiting)
        if was_stuck and self._is_stuck and self.on_broken is not None:
            self.on_broken()

    def _beat_once(self, connection: SignedConnection) -> dict[str, Any]:
        beat = {
            "worker": self.worker,
            "generation": self.generation,
            "step": self.step,
            "progress": self.progress,
        }
        waiting = what_waits(self.waiting, self.tensors()) if self.waiting else ""
        return self._post(
            connection,
            "/elastic/beat",
            beat | {"waiting": waiting, "stall_s": self.stall_s, "raised": self.raised},
        )

    def report_exception(self) -> None:
        """Tell the driver that this process fails by an exception, not by its host:
        the job will end with its exit code.
        """
        self.raised = True
        self._beat_apart()

    def _beat_apart(self) -> None:
        """Send a heartbeat from this thread; a driver that cannot be reached misses it."""
        connection = self.link.connect(BEAT_S)
        with contextlib.suppress(OSError, http.client.HTTPException, JobEnded):
            self._beat_once(connection)
        connection.close()

    def _part(self, pid: int) -> None:
        """Extend the time limit with a last heartbeat when the interpreter,
        and with it this thread, is about to end.
        """
        if os.getpid() != pid or self.stall_s is None or self._thread is None:
            return
        self._parting.set()
        self._thread.join(_PAUSE_S)  # its pending heartbeat must not come after the last one
        self.stall_s = max(self.stall_s, _PARTING_S)
        self._beat_apart()

    def _note_silence(self) -> None:
        if self._silent is None:
            self._silent = time.monotonic()

    def _is_lost(self) -> bool:
        since = self._silent  # the other thread may clear it at any time
        return since is not None and time.monotonic() - since > UNREACHABLE_S
