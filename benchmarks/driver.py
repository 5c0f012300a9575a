"""What an elastic job's driver costs as the job grows: `python -m trainkit launch`, `horovodrun
--min-np` and Slurm's, with workers that are simulated.

    python -m benchmarks.driver [--short] [--json FILE]

A process runs the driver with all its threads. Another one speaks for its workers, each by a
connection of its own, in the protocol of real ones (extensions/elastic/client.py): they request
ranks, beat as often as workers of a job of that size do, one of them is killed, the others see it
by a heartbeat's answer, and all join again with its replacement. What ranks do with one another is
not in it: real ones, which only meet, are benchmarks/meeting.py's.

    forms        from the first request of a rank until the last answer
    heartbeat    the driver's CPU time for one
    share        of a core, while nothing happens
    lost         from the loss until the last worker had heard of it
    forms again  from then until all have ranks
"""

from __future__ import annotations

import heapq
import json
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Cell, Findings, Table, Target, main
from benchmarks.processes import environment
from trainkit.extensions.elastic.client import beat_s, until_beat_s
from trainkit.extensions.elastic.driver import Driver
from trainkit.extensions.elastic.messages import Rules, Start
from trainkit.extensions.elastic.network import Network
from trainkit.extensions.elastic.options import Settings
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.signing import SECRET, Client

RANKS, ON_HOST, STEADY_S = (64, 256, 1024), 8, 10.0
MEETING = (64, 128, 256)


class NoProcesses:
    """A backend that starts nothing."""

    def __init__(self) -> None:
        self.on_exit: dict[str, Callable[[int | None], None]] = {}
        self.given: Mapping[str, str] = {}
        self.is_full = threading.Event()

    def start(
        self, start: Start, given: Mapping[str, str], output: Any, on_exit: Callable[..., None]
    ) -> Any:
        """See Backend."""
        self.on_exit[start.worker], self.given = on_exit, given
        return self

    def of_command(self, command: Any) -> None:
        """See Backend: there are no copies."""

    def send(self, number: int) -> None:
        """See Started."""

    def close(self) -> None:
        """See Backend."""


def serve(ranks: int) -> None:
    """Run a driver, and answer lines of stdin: "cpu", or "kill WORKER"."""
    backend = NoProcesses()
    rules = Rules(np=ranks, min_np=ranks - 1, max_np=ranks)
    hosts = {f"node{i}": ON_HOST for i in range(ranks // ON_HOST)}
    output = WorkerOutput(None, with_time=False)
    network = Network("127.0.0.1", ("lo",))
    driver = Driver(Settings(rules, ("true",), {}), network, output, backend)
    threading.Thread(target=driver.run, args=(hosts, None), daemon=True).start()
    while len(backend.on_exit) < ranks:
        time.sleep(0.01)
    given = backend.given
    print(json.dumps([int(given["HOROVOD_GLOO_RENDEZVOUS_PORT"]), given[SECRET]]), flush=True)
    for line in sys.stdin:
        what, _, worker = line.strip().partition(" ")
        if what == "kill":
            backend.on_exit[worker](-9)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(usage.ru_utime + usage.ru_stime, flush=True)


class Worker:
    """One simulated worker's connection."""

    def __init__(self, name: str, port: int, secret: str) -> None:
        self.name, self.generation = name, 0
        self._client = Client(secret)
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self.beat()  # as real ones do, which prepare themselves before they request a rank
        while not self.answers():
            pass

    def send(self, target: str, content: dict[str, Any]) -> None:
        """Send a request."""
        body = json.dumps({"worker": self.name, "generation": self.generation} | content).encode()
        head = [f"POST {target} HTTP/1.1", "Host: driver", f"Content-Length: {len(body)}"]
        signed = self._client.headers("POST", target, body)
        head += [f"{name}: {value}" for name, value in signed.items()]
        self.socket.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    def join(self) -> None:
        """Request a rank."""
        commit = 1 if self.generation else -1
        asked = {"commit": commit, "replica_size": 1, "is_whole": True, "copies": 0}
        self.send("/elastic/join", asked)

    def beat(self) -> None:
        """Send a heartbeat."""
        state = {"step": 1, "progress": 1, "waiting": "", "stall_s": 300.0, "raised": False}
        self.send("/elastic/beat", state)

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers that are there: call it once the socket can be read."""
        self._read += self.socket.recv(65536)
        answers = []
        while True:
            head, end, body = self._read.partition(b"\r\n\r\n")
            if not end:
                return answers
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(body) < length:
                return answers
            answers.append(json.loads(body[:length]))
            self._read = body[length:]


class Simulation:
    """All workers of one job."""

    def __init__(self, ranks: int) -> None:
        command = [sys.executable, "-m", __spec__.name, "--serve", str(ranks)]
        self.driver = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.driver.stdout is not None
        self.port, self.secret = json.loads(self.driver.stdout.readline())
        self.selector = selectors.DefaultSelector()
        names = [f"node{i}/{n}#1" for i in range(ranks // ON_HOST) for n in range(ON_HOST)]
        self.workers = {name: self.add(name) for name in names}

    def add(self, name: str) -> Worker:
        """Connect a worker."""
        worker = Worker(name, self.port, self.secret)
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def ask(self, line: str) -> float:
        """Send a line to the driver's process; return its CPU time so far."""
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        self.driver.stdin.write(f"{line}\n")
        self.driver.stdin.flush()
        return float(self.driver.stdout.readline())

    def answers(self, timeout_s: float) -> Iterable[tuple[Worker, dict[str, Any]]]:
        """Yield what has been answered."""
        for key, _ in self.selector.select(timeout_s):
            for answer in key.data.answers():
                yield key.data, answer

    def assign(self, workers: Iterable[Worker]) -> float:
        """Let workers request ranks; return the seconds until all have one."""
        waiting = set(workers)
        began = time.perf_counter()
        for worker in waiting:
            worker.join()
        while waiting:
            for worker, answer in self.answers(60.0):
                if answer.get("answer") == "wait":
                    worker.join()
                if answer.get("answer", "wait") == "wait":  # or a heartbeat's
                    continue
                assert answer["answer"] == "rank", answer
                worker.generation = answer["generation"]
                waiting.discard(worker)
        return time.perf_counter() - began

    def beat(self, seconds: float, is_done: Callable[[], bool] = lambda: False) -> int:
        """Let all beat in turn; return how many heartbeats were answered."""
        interval = beat_s(len(self.workers))
        end = time.perf_counter() + seconds
        step = interval / len(self.workers)
        due = [(time.perf_counter() + i * step, name) for i, name in enumerate(self.workers)]
        count = 0
        while (now := time.perf_counter()) < end and not is_done():
            while due and due[0][0] <= now:
                name = heapq.heappop(due)[1]
                self.workers[name].beat()
                pause = until_beat_s(interval, time.time())
                heapq.heappush(due, (time.perf_counter() + pause, name))
            for worker, answer in self.answers(max(0.0, min(due[0][0], end) - now)):
                count += 1
                self.wanted[worker.name] = answer.get("wanted", 0)
        while time.perf_counter() < end + 1 and any(True for _ in self.answers(0.2)):
            pass
        return count

    def run(self, steady_s: float) -> list[float]:
        """Return the figures of one job."""
        self.wanted: dict[str, int] = {}
        forms_s = self.assign(self.workers.values())
        self.beat(beat_s(len(self.workers)) + 1)
        before, began = self.ask("cpu"), time.perf_counter()
        count = self.beat(steady_s)
        spent, took = self.ask("cpu") - before, time.perf_counter() - began
        lost = self.workers.pop("node0/1#1")
        self.selector.unregister(lost.socket)
        lost.socket.close()
        self.wanted.pop(lost.name, None)
        killed = time.perf_counter()
        self.ask(f"kill {lost.name}")
        names = set(self.workers)
        self.beat(60.0, lambda: all(self.wanted.get(name, 0) > 1 for name in names))
        lost_s = time.perf_counter() - killed
        again_s = self.assign(self.workers.values())
        return [forms_s, 1e6 * spent / count, spent / took, lost_s, again_s]


@contextmanager
def simulation(ranks: int) -> Any:
    """A job, until the end of the context."""
    job = Simulation(ranks)
    try:
        yield job
    finally:
        job.driver.kill()
        job.driver.wait()
        for worker in job.workers.values():
            worker.socket.close()


def _meetings(all_ranks: Iterable[int]) -> Table:
    """Return how long real ranks take to meet."""
    rows: list[list[Cell]] = []
    for ranks in all_ranks:
        command = [sys.executable, "-m", "benchmarks.meeting", str(ranks)]
        done = subprocess.run(
            command, env=environment(), check=True, capture_output=True, text=True, timeout=600
        )
        took = json.loads(done.stdout)
        rows.append([str(ranks), took["seconds"], took["cpu_s"], took["megabytes"]])
    return Table("Ranks that meet over Gloo", ["ranks", "s", "driver's CPU, s", "MB"], rows)


def measure(short: bool) -> Findings:
    """Measure drivers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = Findings(settings={"hosts of": ON_HOST, "steady seconds": STEADY_S})
    rows: list[list[Cell]] = []
    for ranks in (16,) if short else RANKS:
        with simulation(ranks) as job:
            rows.append([str(ranks), *job.run(2.0 if short else STEADY_S)])
    columns = ["ranks", "forms, s", "heartbeat, us", "share", "lost, s", "forms again, s"]
    found.tables.append(Table("An elastic job's driver", columns, rows))
    found.tables.append(_meetings((8,) if short else MEETING))
    of_many = next((row for row in rows if row[0] == "1024"), rows[-1])
    what = "driver of 1,024 workers"
    found.targets += [
        Target(f"{what}: a generation forms, s", of_many[1], 5.0, "s"),
        Target(f"{what}: share of a core", of_many[3], 0.1, ""),
    ]
    ranks, seconds = found.tables[-1].rows[-1][:2]
    if not short:  # the target is that of 256 ranks
        found.targets.append(Target(f"{ranks} ranks meet over Gloo, s", seconds, 20.0, "s"))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]))
    else:
        main(measure)
