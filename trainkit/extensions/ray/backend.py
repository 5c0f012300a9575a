"""The driver's Backend on Ray: each slot has a keeper (an actor), which starts the slot's workers
one after the other.

RayBackend.start    -> RayProcess       a thread asks the keeper what is there, then follows the worker's stream
RayBackend.check    the same question to the keepers of all first slots, before anything is started
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from trainkit.errors import ConfigError
from trainkit.extensions.elastic import reaper
from trainkit.extensions.elastic.messages import Start
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.processes import OnExit, code_of, start_timer
from trainkit.extensions.ray import keeper as keeper_module
from trainkit.extensions.ray.sent import without_colors
from trainkit.extensions.ray.slots import Slots
from trainkit.launch.shared_folder import not_shared
from trainkit.safety.threads import printed, start_thread

_GONE_S = 5.0  # so long a node may take to carry out SIGKILL before it counts as lost
# What the driver sets for its own node: a keeper knows that of its node.
_OF_THE_NODE = ("NCCL_SOCKET_IFNAME",)
# Of the driver's environment: the rest is the node's own.
_HANDED_ON = (
    "HOROVOD_",
    "NCCL_",
    "TRAINKIT_",
    "OMP_",
    "MKL_",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
)

cloudpickle.register_pickle_by_value(keeper_module)


@dataclass(frozen=True)
class WorkerProgram:
    """What every worker runs.

    Attributes:
        command: a first word "python" is the node's own Python.
        environ: the driver's environment.
        folder: the folder in which workers start, where a node has it; None: Ray's.
        token: a file that each node must see, relative to that folder; None: none.
        run_dir: the folder of that file, as the user wrote it.
        call: a pickled function for the workers, or None.
        needs_horovod: whether workers need trainkit's Horovod.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    folder: str | None = None
    token: str | None = None
    run_dir: str = ""
    call: bytes | None = None
    needs_horovod: bool = True


class RayBackend:
    """Starts workers in slots.

    Attributes:
        results: what workers with a `call` left, pickled, by name.
    """

    def __init__(self, slots: Slots, work: WorkerProgram) -> None:
        self._slots = slots
        self._work = work
        self._keepers: dict[tuple[str, int], Any] = {}
        self._found_good: set[tuple[str, int]] = set()
        self.results: dict[str, bytes] = {}

    def check(self, hosts: Mapping[str, int], timeout_s: float) -> None:
        """Ask the keepers of all slots what a worker would find on its node.

        Raises:
            ConfigError: trainkit, Horovod or the run's folder is missing on a node, or its
                environment cannot be made.
        """
        places = [(host, slot) for host, slots in hosts.items() for slot in range(slots)]
        asked = {place: self._look(*place) for place in places}
        for place, reference in asked.items():
            try:
                facts = ray.get(reference, timeout=timeout_s)
            except RayError as error:
                cause = cause_of(error)
                if isinstance(error, GetTimeoutError):
                    cause = (
                        f"its actor did not start within {timeout_s:g} s"
                        " (launcher.start_timeout_s)."
                    )
                raise ConfigError(
                    f"No worker can be started on {place[0]}: {cause} Look at launcher.runtime_env,"
                    " and at the node."
                ) from None
            if text := fault_of(facts, place[0], self._work):
                raise ConfigError(text)
            self._found_good.add(place)

    def start(
        self, start: Start, given: Mapping[str, str], output: WorkerOutput, on_exit: OnExit
    ) -> RayProcess:
        """See Backend."""
        place = start.host, start.slot
        environ = self._environ(given)

        def stream() -> Any:
            keeper = self._keeper(*place)
            if place not in self._found_good:
                if text := fault_of(ray.get(self._look(*place)), start.host, self._work):
                    output.say(text)
                    return None
                self._found_good.add(place)
            method = keeper.run.options(num_returns="streaming")
            return method.remote(start.worker, list(self._work.command), environ, self._work.call)

        def ended(code: int | None) -> None:
            if code is None:  # gone with its node, or with its worker: a new one next time
                self._found_good.discard(place)
                self._drop(self._keepers.pop(place, None))
            on_exit(code)

        process = RayProcess(start.worker, lambda: self._keepers.get(place), ended)
        process.follow(stream, output, lambda content: self.results.update({start.worker: content}))
        return process

    def of_command(self, command: Sequence[str]) -> None:
        """See Backend: slots start workers alone."""

    def close(self) -> None:
        """See Backend."""
        for keeper in () if self._slots.is_head_lost else self._keepers.values():
            self._drop(keeper)
        self._keepers.clear()

    def _look(self, host: str, slot: int) -> Any:
        return self._keeper(host, slot).look.remote(self._environ({}), self._work.token)

    def _keeper(self, host: str, slot: int) -> Any:
        keeper = self._keepers.get((host, slot))
        if keeper is None:
            strategy = self._slots.strategy_of(host, slot)
            if strategy is None:
                raise OSError(f"{host} has no slot {slot} any more")
            options = self._slots.options
            text = Path(reaper.__file__).read_text()
            actor = ray.remote(keeper_module.Keeper).options(
                **options.actor, max_concurrency=4, scheduling_strategy=strategy
            )
            keeper = self._keepers[host, slot] = actor.remote(
                text, self._work.folder, self._slots.address_of(host)
            )
        return keeper

    def _environ(self, given: Mapping[str, str]) -> dict[str, str]:
        chosen = (self._slots.options.runtime_env or {}).get("env_vars") or {}  # the actor has them
        handed_on = {
            name: value for name, value in self._work.environ.items() if name.startswith(_HANDED_ON)
        }
        environ = {name: value for name, value in handed_on.items() if name not in chosen}
        environ |= {
            "TRAINKIT_LAUNCHER": "ray",
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        } | {name: value for name, value in given.items() if name not in _OF_THE_NODE}
        if self._slots.options.resources.get("GPU", 0):
            environ["TRAINKIT_GPU"] = "0"
        return environ

    @staticmethod
    def _drop(keeper: Any) -> None:
        if keeper is not None:
            with contextlib.suppress(RayError):
                ray.kill(keeper)


class RayProcess:
    """A worker in a slot; ends with `on_exit`, once."""

    def __init__(self, worker: str, keeper: Callable[[], Any], on_exit: OnExit) -> None:
        self._worker = worker
        self._keeper = keeper
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._has_ended = False

    def follow(
        self, stream: Callable[[], Any], output: WorkerOutput, on_result: Callable[[bytes], None]
    ) -> None:
        """Take a worker's stream from a thread, and copy its output until it ends."""
        ends = {}
        readable = []
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            ends[name] = os.fdopen(write, "wb", buffering=0)
            readable.append(os.fdopen(read, "rb"))
        output.follow(self._worker, readable[0], readable[1])

        def copy() -> None:
            code: int | None = None
            try:
                code = _copied(stream(), ends, on_result)
            except RayError as error:
                # the actor or its node is gone; or its environment cannot be made
                if "runtime" in type(error).__name__.lower():
                    output.say(f"{self._worker}: {cause_of(error)}")
            except OSError as error:
                output.say(f"{self._worker} cannot be started: {error}")
            for end in ends.values():
                end.close()
            self._end(code)

        lost = printed(f"Worker {self._worker} counts as lost.", then=lambda: self._end(None))
        start_thread(f"wait {self._worker}", copy, lost)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all its child processes."""
        with contextlib.suppress(RayError):
            if (keeper := self._keeper()) is not None:
                keeper.send.remote(self._worker, int(number))
        if number == signal.SIGKILL:
            end = functools.partial(self._end, None)  # the node may be gone
            start_timer(
                f"end {self._worker}",
                _GONE_S,
                end,
                printed(f"The end of {self._worker} is not seen."),
            )

    def _end(self, code: int | None) -> None:
        with self._lock:
            has_ended = self._has_ended
            self._has_ended = True
        if not has_ended:
            self._on_exit(code)


def fault_of(facts: Mapping[str, Any], host: str, work: WorkerProgram) -> str:
    """Return what a worker lacks on its node, by what its keeper found there; "" if nothing."""
    cure = (
        "Name it in launcher.runtime_env (pip, or working_dir and env_vars: {PYTHONPATH: ...}), or"
        " install it on all nodes."
    )
    if "error" in facts:
        return (
            f"Python does not start on {host} with the workers' environment:"
            f" {facts['error'].strip()[-300:]}"
        )
    if not facts["trainkit"]:
        return (
            f"The workers' environment on {host} (Python {facts['python']}, {facts['folder']}) has"
            f" no trainkit. {cure}"
        )
    if work.needs_horovod and "+trainkit" not in facts["horovod"]:
        which = (
            f"Horovod {facts['horovod']}, which trainkit did not build"
            if facts["horovod"]
            else "no Horovod"
        )
        return (
            f"The workers' environment on {host} has {which}. Run `python -m trainkit horovod"
            " install` on each node, or once for an image that all nodes use; a runtime_env with"
            " pip cannot build it."
        )
    if not facts["token"]:
        return not_shared(work.run_dir, host, f" (its folder is {facts['folder']})")
    return ""


def cause_of(error: BaseException) -> str:
    """Return the line of an error of Ray's that holds the cause:
    the first of pip's own errors in it, or else its last.
    """
    lines = [line.strip() for line in without_colors(str(error)).splitlines() if line.strip()]
    of_pip = [line for line in lines if line.startswith("ERROR: ")]
    return (of_pip[0] if of_pip else lines[-1] if lines else repr(error))[:300]


def _copied(
    stream: Any, ends: Mapping[str, IO[bytes]], on_result: Callable[[bytes], None]
) -> int | None:
    code: int | None = None
    for reference in stream or ():
        name, content = ray.get(reference)
        if name == "code":
            code = code_of(content)
        elif name == "result":
            on_result(content)
        else:
            ends[name].write(content)
    return code
