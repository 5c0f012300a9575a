"""Copies of ranks' state in the memory of other hosts: servers, the store that a run resumes from, and
when copies are made.
"""

from __future__ import annotations

import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoint.test_pieces import WEIGHT, Left, part, snapshot_of
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.parts import file_of
from trainkit.errors import CheckpointError, ConfigError
from trainkit.extensions.elastic.client import Membership, RankAssignment
from trainkit.extensions.elastic.copies import policy, server
from trainkit.extensions.elastic.copies.client import Address, CopyConnection
from trainkit.extensions.elastic.copies.layout import as_file
from trainkit.extensions.elastic.copies.peers import Holders, Peers
from trainkit.extensions.elastic.copies.server import CopyServer
from trainkit.extensions.elastic.copies.started import CopyServers, server_command
from trainkit.extensions.elastic.copies.store import PeerStore, name_of
from trainkit.extensions.elastic.messages import Start
from trainkit.extensions.elastic.ranks import elastic_ranks
from trainkit.extensions.elastic.rendezvous import WorkerRequest
from trainkit.extensions.elastic.signing import Client
from trainkit.launch.environment import read_launcher

SECRET = "ab" * 32
SETS = name_of(10, 1), name_of(20, 1)


class Hosts(dict[str, CopyServer]):
    """Copy servers of hosts a and b, with a rank on each, which copies to the other host."""

    def __init__(self) -> None:
        super().__init__({host: CopyServer("127.0.0.1", SECRET) for host in "ab"})
        self.said: list[str] = []
        self.stores: list[PeerStore] = []

    @property
    def addresses(self) -> dict[str, Address]:
        """Of those that are not lost."""
        return {host: one.address for host, one in self.items()}

    def lose(self, host: str) -> None:
        """Lose a host, and what its memory held; another one takes its place."""
        self.pop(host).close()
        self[host] = CopyServer("127.0.0.1", SECRET)

    def store(self, rank: int, host: str = "", *, is_fresh: bool = True) -> PeerStore:
        """Return a rank's store, on its own host or on another."""
        own = host or "ab"[rank]
        peers = Peers(lambda: self.addresses, SECRET, Holders(own, ("b" if own == "a" else "a",)))
        file, say = file_of(rank, 2), self.said.append
        self.stores.append(PeerStore(peers, file, lambda step: is_fresh, True, say))
        return self.stores[-1]

    def copy(self, name: str) -> None:
        """Make a copy, as two ranks do."""
        left, token = Left(), (1 << 40) + int(name.split("=")[1].split("-")[0])
        first, second = self.store(0), self.store(1)
        other = threading.Thread(target=left.write_part, args=(second, name, part(1, token)))
        other.start()
        left.write_part(first, name, part(0, token))
        first.write(name, snapshot_of(part(0, token)), left.take)
        other.join()

    def held(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the sizes of all files, by host and set."""
        return {host: one.sets.sizes() for host, one in self.items()}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts."""
    two = Hosts()
    yield two
    for store in two.stores:
        store.release()
    for one in two.values():
        one.close()


# ---- the store


def test_each_host_holds_its_own_part_and_that_of_the_other(hosts: Hosts) -> None:
    """So one of them may be lost; nothing of an older copy is held once the new one is whole."""
    for name in SETS:
        hosts.copy(name)
    files = {file_of(0, 2), file_of(1, 2), "training.pt", "manifest.json"}
    assert {host: {n: set(f) for n, f in sets.items()} for host, sets in hosts.held().items()} == {
        "a": {SETS[1]: files},
        "b": {SETS[1]: files},
    }


@pytest.mark.parametrize("lost", ["a", "b", ""])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_resumes_from_what_is_left(hosts: Hosts, lost: str, rank: int) -> None:
    """Each rank has its own part, from its host's memory if it is there, and of the other's file what
    it has no part of itself; all of it is the bits that were sent.
    """
    hosts.copy(SETS[0])
    if lost:
        hosts.lose(lost)
    store = hosts.store(rank)
    assert store.names() == [SETS[0]] and store.comes_first
    with store.fetch(SETS[0]) as folder:
        assert ckpt.load_training(folder, mapped=True)["step"] == 3
        sent = part(rank).tensors
        assert {
            key: torch.equal(tensor, sent[key])
            for key, tensor in load_file(folder / file_of(rank, 2)).items()
        } == dict.fromkeys(sent, True)
        assert ckpt.open_weights(folder).whole("model/bias").item() == 7
    own, other = store.peers.read_here, store.peers.read_elsewhere
    assert (own == 0) if lost == "ab"[rank] else (own > 0)
    assert (other > 0) if lost == "ab"[rank] else (other == 0)
    store.release()
    assert store.names() == [] and not folder.exists()
    assert hosts.said == []


def test_a_rank_reads_of_other_files_what_it_lacks_alone(hosts: Hosts) -> None:
    """Rank 1 reads the bias of rank 0's file, and not its rows of the weight."""
    hosts.copy(SETS[0])
    with hosts.store(1).fetch(SETS[0]) as folder:
        theirs = load_file(folder / file_of(0, 2))
        assert theirs["model/bias"].item() == 7
        assert torch.equal(theirs["model/weight"], torch.zeros(3, 3)), WEIGHT


def test_without_a_whole_copy_the_checkpoint_is_taken_in_a_line(hosts: Hosts) -> None:
    """If all hosts with a part are lost, that is one line; so it is if no host holds anything."""
    hosts.copy(SETS[0])
    for sets in (one.sets for one in hosts.values()):
        sets._sets[SETS[0]].pop(file_of(1, 2))
    store = hosts.store(0)
    assert store.names() == [] and not store.comes_first and store.names() == []
    (line,) = hosts.said
    assert "step 10" in line and file_of(1, 2) in line and "newest checkpoint" in line
    hosts.said.clear()
    for host in "ab":
        hosts.lose(host)
    assert hosts.store(0).names() == []
    (line,) = hosts.said
    assert line.startswith("No host holds a copy")


def test_a_copy_that_has_not_come_whole_leaves_the_one_before(hosts: Hosts) -> None:
    """The ranks are killed while they send; the next copy drops what had come."""
    hosts.copy(SETS[0])
    hosts.store(1).write_part(SETS[1], part(1, 1 << 41))
    assert hosts.store(0).names() == [SETS[0]]
    assert set(hosts.held()["a"]) == set(SETS)
    third = name_of(20, 2)
    hosts.store(1).write_part(third, part(1, 1 << 42))
    assert set(hosts.held()["a"]) == {SETS[0], third}


def test_a_copy_older_than_it_should_be_is_compared_with_checkpoints(hosts: Hosts) -> None:
    """Else one that could not be sent for an hour would be taken for the newest."""
    hosts.copy(SETS[0])
    assert not hosts.store(0, is_fresh=False).comes_first


def test_a_part_that_has_changed_is_refused(hosts: Hosts) -> None:
    """A flipped bit in a host's memory."""
    hosts.copy(SETS[0])
    data = hosts["b"].sets._sets[SETS[0]][file_of(1, 2)]
    data[-1] ^= 1
    with (
        pytest.raises(CheckpointError, match=r"rank-1-of-2.safetensors has changed"),
        hosts.store(1).fetch(SETS[0]),
    ):
        pass


def test_a_host_that_does_not_take_its_copy_is_an_error_of_the_copy(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory: the rank reports it, with numbers. It has sent nothing: the answer to a
    body of many megabytes would be lost with the connection.
    """
    monkeypatch.setattr(server, "memory_available", lambda: 100)
    large = part(1)._replace(tensors={"model/w": torch.zeros(1 << 24)})
    for content in (part(1), large):
        with pytest.raises(OSError, match=r"507.*are to be stored, .* 100 bytes of memory free"):
            hosts.store(1).write_part(SETS[0], content)


# ---- the servers


def ask(address: Address, method: str, target: str, body: bytes, **headers: str) -> int:
    """Send a request; return its status."""
    connection = http.client.HTTPConnection(*address, timeout=5)
    connection.request(method, target, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_strangers_are_refused_unread(hosts: Hosts) -> None:
    """Without the secret, with a request of another target, or with one that was sent before."""
    data, address = b"x" * 1000, hosts["a"].address
    target = f"/copies/one/file?sha256={hashlib.sha256(data).hexdigest()}"
    huge = {"Content-Length": str(10**12)}
    assert ask(address, "PUT", target, b"", **huge) == 403
    other = Client("cd" * 32).headers("PUT", target)
    assert ask(address, "PUT", target, b"", **other, **huge) == 403
    headers = Client(SECRET).headers("PUT", target)
    assert ask(address, "PUT", target, data, **headers) == 200
    assert ask(address, "PUT", target, data, **headers) == 403
    assert (
        ask(address, "PUT", target, data[1:] + b"y", **Client(SECRET).headers("PUT", target)) == 400
    )
    assert hosts.held()["a"] == {"one": {"file": 1000}}


def test_an_answer_without_the_jobs_signature_is_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program listens at the address."""
    monkeypatch.setattr(server, "sign", lambda *_: "0" * 64)
    with (
        CopyConnection(hosts["a"].address, SECRET) as connection,
        pytest.raises(OSError, match="lacks this job's signature"),
    ):
        connection.sizes()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_a_part_is_a_safetensors_file_without_a_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also of tensors without elements or dimensions; contiguous ones are not copied."""
    sent = {"a": torch.arange(7).to(dtype), "b": torch.ones(2, 3)[:, 1:], "c": torch.tensor(2.0)}
    sent |= {"d": torch.zeros(0, 3, dtype=dtype)}
    views = as_file(sent)
    path = tmp_path / "file"
    path.write_bytes(b"".join(views))
    back = load_file(path)
    assert back.keys() == sent.keys()
    assert all(
        torch.equal(back[key], sent[key]) and back[key].dtype == sent[key].dtype for key in sent
    )
    sent["a"].zero_()
    path.write_bytes(b"".join(views))
    assert not load_file(path)["a"].any()


# ---- the driver's side


class Servers:
    """A backend that starts no process."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.exits: dict[str, Callable[[int | None], None]] = {}
        self.killed: list[str] = []

    def start(self, start: Start, given: Any, output: Any, on_exit: Callable[[Any], None]) -> Any:
        """See Backend."""
        self.started.append(start.host)
        self.exits[start.host] = on_exit
        return SimpleNamespace(send=lambda number: self.killed.append(start.host))

    def of_command(self, command: Any) -> None:
        """See Backend."""

    def close(self) -> None:
        """See Backend."""


class Lines(list[str]):
    """What a driver prints."""

    def say(self, text: str) -> None:
        """Print."""
        self.append(text)

    def label(self, worker: str, text: str) -> None:
        """Ignore."""


def test_each_host_with_a_worker_gets_a_server_and_a_new_one_if_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that asks starts that of its host, once; all learn where servers listen."""
    backend, lines, now = Servers(), Lines(), [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("trainkit.extensions.elastic.copies.started.time", clock)
    servers = CopyServers(backend, lambda start: {}, lines)  # type: ignore[arg-type]

    def asked(worker: str, address: list[Any] | None = None) -> Mapping[str, Any]:
        request = WorkerRequest({"worker": worker, "generation": 0, "address": address})
        servers.answer(request)
        answer = request.wait(0)
        assert answer is not None
        return dict(answer["copies"])

    assert asked("node1/0#1") == asked("node2/0#1") == asked("node2/1#1") == {}
    assert backend.started == ["node1", "node2"]
    assert asked("node2/copies", ["10.0.0.2", 5]) == {"node2": ["10.0.0.2", 5]}
    backend.exits["node2"](None)
    assert "copy server of node2 was lost" in lines[0]
    assert asked("node2/copies", ["10.0.0.2", 5]) == {}, "one that was lost is not believed"
    asked("node2/0#2")
    assert backend.started == ["node1", "node2"], "not again at once"
    now[0] += 10
    asked("node2/0#2")
    assert backend.started == ["node1", "node2", "node2"]
    servers.close()
    assert sorted(backend.killed) == ["node1", "node2"]
    asked("node3/0#1")
    assert len(backend.started) == 3


def test_a_server_runs_by_the_workers_python() -> None:
    """Other hosts have it where the job's command says; a script of another kind does not."""
    assert server_command(["/env/bin/python3.11", "train.py"])[0] == "/env/bin/python3.11"
    assert Path(server_command(["./run.sh"])[0]).is_absolute()


# ---- when, and where to


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a worker of host a."""
    monkeypatch.setattr(Membership, "_current", Membership("a/0#1", ("127.0.0.1", 1), SECRET))
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")


def test_copies_go_to_the_next_hosts() -> None:
    """In the order of ranks, the last one's to the first; as many as there are other hosts."""
    ranks = ["a", "a", "b", "c"]
    assert policy.holders_of(ranks, 1, 1) == Holders("a", ("b",))
    assert policy.holders_of(ranks, 3, 1) == Holders("c", ("a",))
    assert policy.holders_of(ranks, 2, 2) == Holders("b", ("c", "a"))
    assert policy.holders_of(["a", "a"], 0, 1) == Holders("a", ())


def test_without_a_driver_that_holds_copies_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under torchrun, or launcher=ray."""
    monkeypatch.setattr(Membership, "_current", None)
    for name in ("TRAINKIT_WORKER", "TRAINKIT_HOLDS_COPIES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=r"callbacks.elastic.copies is 1, .*`python -m trainkit launch`"
    ):
        policy.announce(1)


@pytest.mark.parametrize(("generation", "was_late"), [(1, "1"), (2, "")])
def test_a_spare_that_gets_its_first_rank_later_resumes(
    member: None, monkeypatch: pytest.MonkeyPatch, generation: int, was_late: str
) -> None:
    """Started with the first ranks, it would begin the run again as a new rank 0; and one that was
    started after them, and is of the first ranks, has nothing to resume from.
    """
    assignment = RankAssignment(generation, 0, 2, 0, 1, 0, 2)
    monkeypatch.setattr(Membership, "join", lambda *_: assignment)
    monkeypatch.setenv("TRAINKIT_LATE", was_late)
    monkeypatch.setenv("TRAINKIT_WORKER", "a/0#1")
    for name in assignment.environment():
        monkeypatch.setenv(name, "")
    ranks = elastic_ranks(read_launcher({}))
    assert ranks.joins_late is bool(was_late)
    ranks.join(None)
    assert ranks.joins_late is elastic_ranks(read_launcher({})).joins_late is (generation > 1)


class Run:
    """A run of one rank, as copies see it."""

    def __init__(self, hosts: list[str], **engine: Any) -> None:
        ranks = SimpleNamespace(rank=0, world_size=len(hosts), joins_late=False)
        comm = SimpleNamespace(all_gather_object=lambda host: hosts, sum_number=lambda own: own)
        given = {"splits_weights": True, "name": "fsdp", "ranks": ranks, "comm": comm}
        self.engine = SimpleNamespace(**(given | engine))
        self.checkpoints = SimpleNamespace(stores=[], contents=None, resumed_from=None)
        self.global_step, self.said = 0, list[str]()
        self.say = self.said.append


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(["a", "b"], splits_weights=False, name="ddp"), "engine is ddp: each rank holds all"),
        (Run(["a", "a"]), r"all ranks are on 1 host \(a\).*-H a:4,b:4"),
    ],
)
def test_copies_without_effect_are_refused(member: None, run: Any, message: str) -> None:
    """Where each rank has all state, or a copy would be lost with its host."""
    with pytest.raises(ConfigError, match=message):
        policy.Copies(run, 1, 10)


def test_a_job_that_has_lost_hosts_trains_on_with_fewer_copies(member: None) -> None:
    """Ranks that all were replaced on the one host that is left warn, and train."""
    run: Any = Run(["a", "a"])
    run.engine.ranks.joins_late = True
    policy.Copies(run, 1, 10)
    assert "WARNING" in run.said[0]


def test_a_copy_that_is_still_being_sent_delays_the_next(
    member: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does not wait for it; once it costs more steps than asked for, that is said once."""
    run: Any = Run(["a", "b"])
    copies = policy.Copies(run, 1, 10)
    made: list[int] = []
    monkeypatch.setattr(
        copies,
        "copy",
        lambda: (made.append(run.global_step), setattr(copies, "_last", run.global_step)),
    )
    copies._last, busy = 0, [False]
    monkeypatch.setattr(copies, "_writer", SimpleNamespace())
    monkeypatch.setattr(type(copies), "is_sending", property(lambda self: busy[0]))
    for run.global_step in range(1, 46):
        busy[0] = 10 <= run.global_step < 14 or run.global_step >= 20
        copies.copy_if_due()
    assert made == [14]
    (line,) = run.said
    assert line.startswith("The copy of step 14 is still being sent to other hosts at step 34")
