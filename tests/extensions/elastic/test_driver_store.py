"""The driver's store of a generation: whose end gives it up, and whose does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import Signals

import pytest

from tests.faults.jobs import wait_for
from trainkit.engine.collectives import PeerError
from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.driver import Driver
from trainkit.extensions.elastic.messages import Rules, Start
from trainkit.extensions.elastic.network import Network
from trainkit.extensions.elastic.options import Settings
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.store import DriverStore


class Ended:
    """A worker in name only, which ends as soon as it gets a signal."""

    def __init__(self, on_exit: Callable[[int | None], None]) -> None:
        self.exit = on_exit

    def send(self, number: Signals) -> None:
        """End."""
        self.exit(-number)


class Workers:
    """A backend that starts no process; the test joins in the workers' names."""

    driver: Driver

    def __init__(self) -> None:
        self.started: dict[str, Ended] = {}
        self.given: dict[str, Mapping[str, str]] = {}

    def start(
        self,
        start: Start,
        given: Mapping[str, str],
        output: WorkerOutput,
        on_exit: Callable[[int | None], None],
    ) -> Ended:
        """See Backend."""
        self.given[start.worker] = given
        self.started[start.worker] = Ended(on_exit)
        return self.started[start.worker]

    def of_command(self, command: Sequence[str]) -> None:
        """See Backend: there are no copies."""

    def close(self) -> None:
        """See Backend."""

    def await_start(self, worker: str) -> None:
        """Wait until the driver has started a worker."""
        wait_for(lambda: worker in self.started, f"the start of {worker}", timeout_s=30)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Workers of a job of one rank and at most two, whose driver runs in a thread."""
    rules = Rules(np=1, min_np=1, max_np=2)
    backend, network = Workers(), Network("127.0.0.1", ("lo",))
    driver = Driver(
        Settings(rules, ("true",), {}), network, WorkerOutput(None, with_time=False), backend
    )
    backend.driver = driver
    loop = threading.Thread(target=driver.run, args=({"node1": 1, "node2": 1}, None))
    loop.start()
    yield backend
    driver.post(lambda now: driver.state_machine.signalled(now, Signals.SIGTERM))
    loop.join(30)
    driver.close()
    assert not loop.is_alive()


def test_the_end_of_another_worker_leaves_the_meeting_of_a_generation_alone(
    workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that dies without a rank, or with one of an earlier generation, as the last one of a
    host that lost its power, is no peer of those that meet; the end of a peer is known at once.
    """
    workers.await_start("node2/0#1")
    rank = Membership.of(workers.given["node1/0#1"])
    rank.generation = rank.join(-1).generation
    store = DriverStore(rank)
    store.set("address", "here")
    workers.started["node2/0#1"].exit(-9)
    workers.await_start("node2/0#2")
    assert store.get("address") == b"here"
    workers.started["node1/0#1"].exit(-9)
    with pytest.raises(PeerError, match="Another rank ended"):
        store.wait(["the address of rank 1"])
    store.close()
    printed: list[str] = []  # after the worker hears of it, by the driver's loop

    def is_printed() -> bool:
        printed.append(capfd.readouterr().err)
        return "rank 0 (node1, slot 0) was killed by SIGKILL" in "".join(printed)

    wait_for(is_printed, "the end of rank 0 in the output", timeout_s=30)


def test_a_worker_is_asked_once_for_its_stacks(workers: Workers) -> None:
    """Its heartbeats are answered beside the loop, which hears of them later."""
    workers.await_start("node1/0#1")
    rank = Membership.of(workers.given["node1/0#1"])
    dumps: list[int] = []
    rank.on_dump = lambda: dumps.append(rank.step)
    rank.join(-1)
    known = workers.driver.state_machine.job.workers["node1/0#1"]
    workers.driver.post(lambda now: setattr(known, "dump", "wanted"))
    wait_for(lambda: bool(dumps), "the request", timeout_s=30)
    wait_for(lambda: not known.dump, "the heartbeat after it", timeout_s=30)
    rank.step = 5
    wait_for(lambda: known.step == 5, "another heartbeat", timeout_s=30)
    assert dumps == [0]
