"""The driver of an elastic job: starts workers, assigns their ranks, and replaces lost
workers.

    run_elastic(args)                   called by horovodrun, with its parsed arguments
    options.py                      the job's settings
    network.py, rendezvous.py       the server for the workers; their requests become events
    hosts.py                        hosts that appear or vanish: events too
    backend.py, processes.py        starts workers here and by ssh; their ends are events (extensions/ray has another backend)
    copies/                         copies of ranks' state in other hosts' memory, if ranks ask for them
    upstream.py                     Horovod's own driver, for scripts that call hvd.init() themselves
    Driver.run                      one loop: event -> state_machine.py -> decisions -> processes

All events go through one queue, so only one thread uses the state machine. There is no polling: a
thread waits for each process to end, and a worker that waits for a rank is answered in the same
turn of the loop.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from trainkit.errors import ConfigError
from trainkit.extensions.elastic.backend import Backend, HostBackend, HostSource, Started
from trainkit.extensions.elastic.copies.server import REGISTER
from trainkit.extensions.elastic.copies.started import CopyServers, host_of, server_command
from trainkit.extensions.elastic.hosts import EVERY_S, Discovery
from trainkit.extensions.elastic.messages import Decision, Say, Send, Start
from trainkit.extensions.elastic.network import Network, check_names, choose
from trainkit.extensions.elastic.options import Settings, settings_of
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.rendezvous import Server, WorkerRequest
from trainkit.extensions.elastic.signing import SECRET, new_secret
from trainkit.extensions.elastic.state_machine import StateMachine
from trainkit.extensions.elastic.upstream import run_upstream
from trainkit.launch.network import is_local

TICK_S = 0.2
# A tick looks at all workers: of thousands it comes so many times as late as the last one took.
_TICKS, _LONGEST_TICK_S = 100.0, 1.0
# So many times as long as consequences took the loop waits for more events that will share the next
# ones: what a thousand workers do at once costs in proportion to them, and not to their square.
_REST = 3.0
_DRAIN_S = 2.0

Event = Callable[[float], object]  # its decisions are those of the state machine, for all together


def run_elastic(args: argparse.Namespace) -> int:
    """Run an elastic job for horovodrun, with what its parse_args() returned,
    and return its exit code.
    """
    from horovod.runner.common.util import config_parser

    environ = dict(os.environ)
    config_parser.set_env_from_args(environ, args)
    try:
        ended = run(settings_of(args, environ, sys.argv))
    except ConfigError as error:
        print(f"[elastic] {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return ended if isinstance(ended, int) else run_upstream(args, ended)


def run(settings: Settings) -> int | Network:
    """Run a job to its end, and return its exit code, or its network if Horovod's own driver is to
    run it.

    Raises:
        ConfigError: there are no hosts, one has no address, or they are unreachable.
    """
    output = WorkerOutput(settings.output, settings.with_time)
    discovery = None if settings.script is None else Discovery(settings.script, settings.slots)
    with contextlib.ExitStack() as stack:
        if discovery is not None:
            stack.callback(discovery.close)
        hosts = _first_hosts(settings, discovery, output)
        network = choose(hosts, settings.interfaces, settings.driver_interface)
        code = drive(Driver(settings, network, output, HostBackend(settings)), hosts, discovery)
        return network if code is None else code


def drive(driver: Driver, hosts: dict[str, int], source: HostSource | None) -> int | None:
    """Run a driver to its end, with this process's signals, and close it;
    arguments and result are those of Driver.run.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(driver.close)
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            stack.enter_context(_signals(driver))
        return driver.run(hosts, source)


def _first_hosts(
    settings: Settings, discovery: Discovery | None, output: WorkerOutput
) -> dict[str, int]:
    if discovery is None:
        check_names(settings.hosts)
        return dict(settings.hosts)
    end = time.monotonic() + settings.rules.timeout_s
    reported = False
    while not (hosts := discovery.ask()):
        if time.monotonic() > end:
            raise ConfigError(
                f"--host-discovery-script '{settings.script}' named no host for"
                f" {settings.rules.timeout_s:g} s."
            )
        if not reported:
            output.say(f"'{settings.script}' names no host yet; asking every second")
        reported = True
        time.sleep(EVERY_S)
    return hosts


@contextlib.contextmanager
def _signals(driver: Driver) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        driver.post(lambda now: driver.state_machine.signalled(now, signal.Signals(number)))

    handled = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Driver:
    """One job's loop and its parts: server, processes, and workers waiting for an answer."""

    def __init__(
        self, settings: Settings, network: Network, output: WorkerOutput, backend: Backend
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._network = network
        self._output = output
        self._secret = new_secret()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._asking: dict[str, WorkerRequest] = {}
        self._processes: dict[str, Started] = {}
        self._generation = 0
        self._started = time.strftime("%Y-%m-%d_%H-%M-%S")
        self._refused: set[str] = set()
        self.state_machine = StateMachine(settings.rules, time.monotonic())
        self._news = self.state_machine.news()
        self._heartbeats: deque[Event] = deque()
        self._rests_until = 0.0
        self._dumping: set[str] = set()  # workers that were asked for their stacks
        self._server = Server(
            network.address, self._secret, self._on_join, self._on_beat, self._on_unassigned
        )
        starter = backend.of_command(server_command(settings.command))
        self._copies = None if starter is None else CopyServers(starter, self._given, output)
        if self._copies is not None:
            self._server.posts[REGISTER] = self._copies.answer

    def post(self, event: Event) -> None:
        """Queue an event for the loop; called from any thread, and from signal handlers."""
        self._inbox.put(event)

    def run(self, hosts: dict[str, int], source: HostSource | None) -> int | None:
        """Run the job; return its exit code,
        or None if its script calls hvd.init() itself (`passes_on`).
        """
        self._on_hosts(hosts)
        if source is not None:
            source.watch(hosts, self._on_hosts, self._output.say)
        ticks_at = time.monotonic() + TICK_S
        while not self.state_machine.finished:
            events = self._next(ticks_at)
            now = time.monotonic()
            ticks = now >= ticks_at
            with self.state_machine.together(now) as decisions:
                for event in events:
                    event(now)
                if ticks:
                    self.state_machine.tick(now)
            self._news = self.state_machine.news()
            self._dumping -= self._dumping - self._news.dumps
            self._answer()  # before starting anything: waiting workers continue
            took_s = time.monotonic() - now
            self._rests_until = now + took_s + min(_REST * took_s, TICK_S)
            if ticks:
                ticks_at = now + max(TICK_S, min(_TICKS * took_s, _LONGEST_TICK_S))
            for decision in decisions:
                self._do(decision)
        over = self.state_machine.job.over
        assert over is not None
        self._output.drain(_DRAIN_S)
        self._output.say(
            over.why if not over.code else f"the job ends with exit code {over.code}: {over.why}"
        )
        return over.code

    def _next(self, until: float) -> list[Event]:
        """Return the events that have come, at the latest at `until`, with all heartbeats."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._inbox.get(timeout=max(0.0, until - time.monotonic())))
            time.sleep(max(0.0, self._rests_until - time.monotonic()))
            while True:
                events.append(self._inbox.get_nowait())
        heartbeats = [self._heartbeats.popleft() for _ in range(len(self._heartbeats))]
        return heartbeats + events

    def close(self) -> None:
        """Kill remaining processes (there are some only if `run` raised) and close the server."""
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        if self._copies is not None:
            self._copies.close()
        self._server.close()
        self._backend.close()

    # ---- events from other threads

    def _on_hosts(self, hosts: dict[str, int]) -> None:
        reachable = {
            host: slots
            for host, slots in hosts.items()
            if not self._network.is_closed or is_local(host)
        }
        for host in hosts.keys() - reachable.keys() - self._refused:
            self._refused.add(host)
            self._output.say(
                f"{host} is ignored: the job started on this host only, at {self._network.address};"
                " start it with --network-interfaces driver=NAME to allow other hosts later"
            )
        self.post(lambda now: self.state_machine.hosts(now, reachable))

    def _on_join(self, request: WorkerRequest) -> None:
        content = request.content
        if content["copies"] and self._copies is not None:
            self._copies.ensure(host_of(content["worker"]))

        def event(now: float) -> None:
            self._asking[content["worker"]] = request
            if content["generation"] == self._generation:
                self._server.give_up(self._generation)
            self.state_machine.joined(
                now,
                content["worker"],
                content["commit"],
                content["generation"],
                content["replica_size"],
                content["is_whole"],
                content["copies"],
            )

        self.post(event)

    def _on_unassigned(self) -> None:
        if self._settings.passes_on:
            self.post(self.state_machine.unassigned)

    def _on_beat(self, request: WorkerRequest) -> None:
        """Answer a heartbeat in its own thread; the loop hears of it with the next event."""
        content = request.content
        at = time.monotonic()
        name = content["worker"]
        reply = self._news.reply(name)
        reply["dump"] = dumps = reply["dump"] and name not in self._dumping
        if dumps:
            self._dumping.add(name)
        if self._copies is not None:
            self._copies.step = max(self._copies.step, content["step"])

        def event(_: float) -> None:
            self.state_machine.beat(at, name, content)
            if dumps:
                self.state_machine.requested(name)

        self._heartbeats.append(event)
        request.answer(reply)

    def _on_exit(self, worker: str, code: int | None) -> None:
        def event(now: float) -> None:
            self._processes.pop(worker, None)
            # a worker without a rank in the newest generation does not meet with the others
            if code != 0 and worker in self.state_machine.job.members:
                self._server.give_up(self._generation)
            self.state_machine.exited(now, worker, code)

        self.post(event)

    # ---- decisions

    def _answer(self) -> None:
        """Answer the workers that wait for a rank, if there is an answer."""
        if self.state_machine.job.generation > self._generation:
            self._generation = self.state_machine.job.generation
            self._server.forget(before=self._generation)
            for worker in self.state_machine.job.workers.values():
                if worker.assignment is not None:
                    self._output.label(worker.name, str(worker.assignment.rank))
        for name in list(self._asking):
            answer = self.state_machine.answer(name)
            if answer is not None:
                self._asking.pop(name).answer(answer)

    def _do(self, decision: Decision) -> None:
        if isinstance(decision, Say):
            self._output.say(decision.text)
        elif isinstance(decision, Send):
            if decision.worker in self._processes:
                self._processes[decision.worker].send(decision.number)
        else:
            self._start(decision)

    def _start(self, start: Start) -> None:
        if self._settings.verbose:
            self._output.say(f"{start.worker} is started: {' '.join(self._settings.command)}")
        on_exit = functools.partial(self._on_exit, start.worker)
        try:
            self._processes[start.worker] = self._backend.start(
                start, self._given(start), self._output, on_exit
            )
        except OSError as error:
            self._output.say(f"{start.worker} cannot be started: {error}")
            self._on_exit(start.worker, 127)

    def _given(self, start: Start) -> Mapping[str, str]:
        """Return the job's variables in a worker's environment.
        The numbers are placeholders until it has a rank.
        """
        np = self._settings.rules.np
        rank = np if start.first is None else start.first
        numbers = {
            "RANK": rank,
            "SIZE": max(np, rank + 1),
            "LOCAL_RANK": 0,
            "LOCAL_SIZE": 1,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }
        return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()} | {
            SECRET: self._secret,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._network.address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.port),
            "HOROVOD_GLOO_IFACE": self._network.interfaces[0],
            "NCCL_SOCKET_IFNAME": ",".join(self._network.interfaces),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": start.host,
            "PYTHONUNBUFFERED": "1",
            "TRAINKIT_WORKER": start.worker,
            "TRAINKIT_SLOT": str(start.slot),
            "TRAINKIT_HOLDS_COPIES": "" if self._copies is None else "1",
            "TRAINKIT_JOB_STARTED": self._started,
            "TRAINKIT_LATE": "" if start.first is not None else "1",
            "TRAINKIT_NP": str(np),
            "TRAINKIT_MIN_RANKS": str(self._settings.rules.min_np),
            "TRAINKIT_MAX_RANKS": str(self._settings.rules.max_np or 0),
        }
