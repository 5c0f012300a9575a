"""The store by which torch's groups of an elastic job form: the driver's, generation by generation."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainkit.engine.collectives import PeerError
from trainkit.engine.ddp.sockets import Sockets
from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.connections import SignedConnection
from trainkit.extensions.elastic.rendezvous import Server
from trainkit.extensions.elastic.store import DriverStore
from trainkit.extensions.elastic.torch_store import STORE

SECRET = "ab" * 32


@pytest.fixture
def server() -> Iterator[Server]:
    """A driver's server."""
    one = Server("127.0.0.1", SECRET, lambda request: None, lambda request: None)
    yield one
    one.close()


class Stores:
    """The stores of ranks, by generation; closed when a test ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._opened: list[DriverStore] = []

    def of(self, generation: int = 1) -> DriverStore:
        """Return a rank's store of a generation."""
        membership = Membership("a/0#1", ("127.0.0.1", self._server.port), SECRET)
        membership.generation = generation
        self._opened.append(DriverStore(membership))
        return self._opened[-1]

    def close(self) -> None:
        """Close them all."""
        while self._opened:
            self._opened.pop().close()


@pytest.fixture
def stores(server: Server) -> Iterator[Stores]:
    """Stores of ranks at the server."""
    made = Stores(server)
    yield made
    made.close()


def group_of(store: DriverStore, rank: int, size: int) -> Any:
    """Return a group of Gloo whose ranks meet by a store."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))


def test_values_are_those_of_torchs_own_store(stores: Stores) -> None:
    """Bytes, numbers, deletion and questions give what torch's HashStore gives."""
    expected, ours = dist.HashStore(), stores.of()

    def use(store: Any) -> list[Any]:
        store.set("a", "text")
        store.set("b", "\u00e9")
        numbers = [store.add("n", 2), store.add("n", 3)]
        store.wait(["a", "b"], timedelta(seconds=5))
        seen = [store.get("a"), store.get("b"), store.get("n"), *numbers]
        store.multi_set(["x", "y"], ["1", "2"])
        store.append("y", "3")
        store.append("z", "4")
        seen += store.multi_get(["x", "y", "z"])
        return [*seen, store.check(["a", "c"]), store.delete_key("a"), store.check(["a"])]

    assert use(ours) == use(expected)


def test_a_generation_has_values_of_its_own(server: Server, stores: Stores) -> None:
    """What an earlier generation set is not there in the next, and goes with `forget`."""
    stores.of(1).set("a", "1")
    assert not stores.of(2).check(["a"])
    server.forget(before=2)
    assert not stores.of(1).check(["a"])


def test_a_rank_that_waits_has_an_error_when_its_generation_is_given_up(
    server: Server, stores: Stores
) -> None:
    """It does not wait for the address of a rank that died before it could set it."""
    errors: list[BaseException] = []
    is_there = threading.Event()

    def wait() -> None:
        is_there.set()
        try:
            stores.of().wait(["the address of rank 1"])
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    is_there.wait(10)
    server.give_up(1)
    thread.join(30)
    assert [str(error) for error in errors] == ["Another rank ended while the ranks met."]
    with pytest.raises(PeerError, match="Another rank ended"):
        stores.of().set("a", "1")


def test_a_key_that_does_not_come_is_an_error_in_time(server: Server, stores: Stores) -> None:
    """The error names the key."""
    server.torch_store._longest_s = 0.05
    with pytest.raises(PeerError, match="late did not come within"):
        stores.of().wait(["late"], timedelta(seconds=0.1))


def test_a_driver_that_is_gone_is_an_error(server: Server, stores: Stores) -> None:
    """A rank that meets others when the driver dies ends like one that lost a peer."""
    store = stores.of()
    server.close()
    with pytest.raises(PeerError, match="did not answer"):
        store.set("a", "1")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"action": "set"},
        {"action": "grow", "keys": ["a"], "value": "", "generation": 1},
        {"action": "get", "keys": [], "value": "", "generation": 1},
        {"action": "get", "keys": ["a"], "value": "", "generation": "x"},
    ],
)
def test_a_request_of_another_form_is_refused(server: Server, content: Any) -> None:
    """With 400, and the store stays as it is."""
    connection = SignedConnection(("127.0.0.1", server.port), SECRET, 5.0)
    status, text = connection.post(STORE, content)
    connection.close()
    assert status == 400 and b"not a request" in text


def test_two_ranks_meet_sum_and_leave_nothing_behind(stores: Stores) -> None:
    """Twenty generations of a group form in one process; its open files stay as many."""

    def work(rank: int, generation: int, sums: list[float]) -> None:
        group = group_of(stores.of(generation), rank, 2)
        number = torch.tensor(float(rank + 1))
        group.allreduce([number]).wait()
        sums.append(float(number))

    counts = []
    for generation in range(1, 21):
        sums: list[float] = []
        threads = [threading.Thread(target=work, args=(r, generation, sums)) for r in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sums == [3.0, 3.0]
        stores.close()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    # threads of the driver may still close what a generation opened: the least of the last five
    assert min(counts[-5:]) <= counts[4] + 4, counts


def meet(stores: Stores, ranks: int) -> list[BaseException]:
    """Let ranks meet; return their errors."""
    errors: list[BaseException] = []

    def form(rank: int, store: DriverStore) -> None:
        try:
            group_of(store, rank, ranks)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=form, args=(rank, stores.of())) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_a_meeting_costs_a_rank_two_requests(
    server: Server, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of ranks: it sets its address, and gets those of all others at once."""
    asked: list[str] = []
    answer = server.torch_store.answer

    def counted(request: Any) -> Any:
        asked.append(request.action)
        return answer(request)

    monkeypatch.setattr(server.torch_store, "answer", counted)
    assert meet(stores, 8) == []
    assert sorted(asked) == ["get"] * 8 + ["set"] * 8


def test_a_meeting_of_a_generation_that_is_given_up_ends(server: Server, stores: Stores) -> None:
    """A rank that waits for the addresses of all has an error at once."""
    errors: list[BaseException] = []

    def form() -> None:
        try:
            group_of(stores.of(), 0, 2)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=form)
    thread.start()
    while not server.torch_store._values.get(1):
        time.sleep(0.01)
    server.give_up(1)
    thread.join(15)
    assert not thread.is_alive()
    assert "Another rank ended while the ranks met" in str(errors[0])


def test_sockets_that_are_shut_down_end_a_rank_that_waits(stores: Stores) -> None:
    """A rank whose peer is silent, as behind a cable that was pulled, has an error at once."""
    sockets = Sockets()
    groups: list[Any] = [None, None]

    def meet(rank: int) -> None:
        groups[rank] = group_of(stores.of(), rank, 2)

    with sockets.opening():
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    waiting = groups[0].allreduce([torch.ones(1)])  # rank 1 does not take part
    sockets.shut_down()
    with pytest.raises(RuntimeError, match=r"gloo/|Connection"):
        waiting.wait(timedelta(seconds=15))


_FORKS = """
import os, socket, sys
from trainkit.engine.ddp.sockets import Sockets

sockets = Sockets()
with sockets.opening():
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
if (fork := os.fork()) == 0:
    os.read(0, 1)
    os._exit(0)
accepted.close()
peer.settimeout(20)
try:
    print("the peer has read", peer.recv(1), flush=True)
finally:
    os.kill(fork, 9)
"""


def test_a_fork_holds_no_connection_open() -> None:
    """A peer sees the end of a rank while a loader worker of that rank lives, also by a connection
    that came in after Gloo's start.
    """
    command = [sys.executable, "-c", _FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "the peer has read b''\n"


_OBJECTS = """
import os, socket
from trainkit.engine.ddp.sockets import Sockets

sockets = Sockets()
with sockets.opening():
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
if os.fork() == 0:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(9)]
    for copy in (listener, peer):
        copy.close()
    for file in files:
        os.fstat(file)
    print("its files are open", flush=True)
    os._exit(0)
os.wait()
"""


def test_objects_of_a_connection_close_no_file_of_a_fork() -> None:
    """A loader worker's copies of Gloo's objects close their sockets when they are deleted: no
    shared memory of a batch may have such a number by then. torch ends a worker whose batch is
    closed that way.
    """
    job = subprocess.run(
        [sys.executable, "-c", _OBJECTS], check=False, capture_output=True, text=True, timeout=60
    )
    assert job.stdout == "its files are open\n", job.stderr


def test_threads_share_a_connection(stores: Stores) -> None:
    """A checkpoint's thread and that of copies leave and take reports at the same time."""
    store, failed = stores.of(), list[BaseException]()

    def use(name: str) -> None:
        try:
            for i in range(50):
                store.set(f"{name}/{i}", str(i))
                assert store.get(f"{name}/{i}") == str(i).encode()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
