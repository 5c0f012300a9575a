"""The rendezvous server: a key-value store and the workers' requests, for signed requests only."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from trainkit.extensions.elastic import connections, pauses
from trainkit.extensions.elastic import rendezvous as module
from trainkit.extensions.elastic.connections import NotSigned, SignedConnection
from trainkit.extensions.elastic.rendezvous import Server, WorkerRequest
from trainkit.extensions.elastic.signing import HEADER, Client, sign

SECRET = "ab" * 32
BEAT = {
    "worker": "a/0#1",
    "generation": 1,
    "step": 2,
    "progress": 3,
    "waiting": "",
    "stall_s": None,
    "raised": False,
}


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that answers heartbeats with their content, and lets joins wait."""
    one = Server(
        "127.0.0.1", SECRET, lambda request: None, lambda request: request.answer(request.content)
    )
    yield one
    one.close()


def ask(
    server: Server,
    method: str,
    target: str,
    body: bytes = b"",
    signature: str | None = "",
    **headers: str,
) -> tuple[int, bytes]:
    """Send a request, correctly signed unless a signature is given; None: unsigned."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    signed = {} if signature is None else Client(SECRET).headers(method, target, body)
    connection.request(
        method, target, body, signed | ({HEADER: signature} if signature else {}) | headers
    )
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text


def test_values_are_bytes_and_stay_bytes(server: Server) -> None:
    """A stored value is returned unchanged; a missing one is 404."""
    value = bytes(range(256))
    assert ask(server, "PUT", "/g1.global/0", value) == (200, b"")
    assert ask(server, "GET", "/g1.global/0") == (200, value)
    assert ask(server, "GET", "/g2.global/0") == (404, b"")


def test_a_generations_values_outlive_the_ranks_that_delete_theirs(server: Server) -> None:
    """A rank that has found all others deletes its own key while others still search for it."""
    for scope in ("g1.global", "plain"):
        ask(server, "PUT", f"/{scope}/0", b"x")
        assert ask(server, "DELETE", f"/{scope}/0") == (200, b"")
    assert ask(server, "GET", "/g1.global/0") == (200, b"x")
    assert ask(server, "GET", "/plain/0") == (404, b"")


def test_a_value_without_a_generation_is_reported() -> None:
    """A worker without a rank stores such values when it calls hvd.init();
    trainkit's workers have a rank then.
    """
    calls: list[str] = []
    server = Server(
        "127.0.0.1",
        SECRET,
        lambda request: None,
        lambda request: None,
        lambda: calls.append("unassigned"),
    )
    ask(server, "PUT", "/g1.global/0", b"x")
    assert calls == []
    ask(server, "PUT", "/global/0", b"x", signature="cd" * 32)
    assert calls == [], "not signed by a worker of this job"
    ask(server, "PUT", "/global/0", b"x")
    assert calls == ["unassigned"]
    server.close()


def test_older_generations_are_forgotten(server: Server) -> None:
    """A long job does not fill the memory."""
    for scope in ("g9.global", "g10.local_a", "g11.global", "plain", "gx.a", "g.a"):
        server.put(scope, "0", b"x")
    server.forget(before=11)
    assert [
        server.get(s, "0")
        for s in ("g9.global", "g10.local_a", "g11.global", "plain", "gx.a", "g.a")
    ] == [None] * 2 + [b"x"] * 4


def test_a_lookup_in_a_broken_generation_is_refused(server: Server) -> None:
    """410 for a value that will never come, instead of a search of 30 s;
    existing values can still be read.
    """
    server.put("g2.global", "0", b"x")
    server.give_up(2)
    assert ask(server, "GET", "/g2.global/1")[0] == ask(server, "GET", "/g1.local_a/0")[0] == 410
    assert ask(server, "GET", "/g2.global/0") == (200, b"x")
    assert ask(server, "GET", "/g3.global/1")[0] == ask(server, "GET", "/plain/1")[0] == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize(
    "signature", [None, "00" * 32, sign("cd" * 32, "PUT", "/a/b", f"{'ab' * 16}.1", b"x")]
)
def test_an_unsigned_request_is_refused(server: Server, method: str, signature: str | None) -> None:
    """403, and nothing is done."""
    server.put("a", "b", b"before")
    body = b"x" if method in ("PUT", "POST") else b""
    assert ask(server, method, "/a/b", body, signature)[0] == 403
    assert server.get("a", "b") == b"before"


@pytest.mark.parametrize("target", ["/a", "/a/b/c", "/a/", "a/b"])
def test_a_path_is_a_scope_and_a_key(server: Server, target: str) -> None:
    """400 for any other path."""
    assert ask(server, "PUT", target, b"x")[0] == 400


def test_a_beat_is_answered_at_once(server: Server) -> None:
    """With its content checked: names and numbers."""
    status, text = ask(server, "POST", "/elastic/beat", json.dumps(BEAT | {"more": 1}).encode())
    assert (status, json.loads(text)) == (200, BEAT)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"worker": "a/0#1"}', json.dumps(BEAT | {"step": "x"}).encode(), b"\xff"],
)
def test_a_malformed_request_is_refused(server: Server, body: bytes) -> None:
    """400, for invalid JSON and for a missing value."""
    assert ask(server, "POST", "/elastic/beat", body)[0] == 400


def test_there_are_no_other_requests(server: Server) -> None:
    """404."""
    assert ask(server, "POST", "/elastic/shutdown", b"{}")[0] == 404


def test_who_is_not_answered_in_time_asks_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "wait"."""
    monkeypatch.setattr(module, "POLL_S", 0.05)
    content = {"worker": "a/0#1", "generation": 0, "commit": -1}
    body = json.dumps(content | {"replica_size": 1, "is_whole": True, "copies": 0}).encode()
    assert ask(server, "POST", "/elastic/join", body) == (200, b'{"answer": "wait"}')


def test_a_body_that_is_too_large_is_not_read(server: Server) -> None:
    """413, by its length alone."""
    for length in (str(module.LARGEST + 1), "9" * 5000, "-1", "\xb2"):
        assert ask(server, "PUT", "/a/b", b"", **{"Content-Length": length})[0] == 413


def test_a_request_counts_once(server: Server) -> None:
    """Recorded and sent again by a stranger, it is refused."""
    recorded = Client(SECRET).headers("PUT", "/a/b", b"x")
    assert [ask(server, "PUT", "/a/b", b"x", None, **recorded)[0] for _ in range(2)] == [200, 403]


def test_an_answer_is_used_if_it_is_signed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes the driver's word;
    a program at its address that lacks the secret is as good as none.
    """
    address = "127.0.0.1", server.port
    connection = SignedConnection(address, SECRET, 5)
    assert connection.post("/elastic/beat", BEAT) == (200, json.dumps(BEAT).encode())
    monkeypatch.setattr(module, "sign", lambda *_: "00" * 32)
    with pytest.raises(NotSigned, match="signature"):
        connection.post("/elastic/beat", BEAT)
    connection.close()


def test_strangers_cannot_fill_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest silent connection is closed for a new one; those of workers stay open."""
    monkeypatch.setattr(connections, "MOST_STRANGERS", 2)
    worker = SignedConnection(("127.0.0.1", server.port), SECRET, 5)
    worker.post("/elastic/beat", BEAT)
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(3)]
    assert silent[0].recv(1) == b""
    monkeypatch.setattr(worker._http, "connect", None)  # the worker's connection is still the first
    assert worker.post("/elastic/beat", BEAT)[0] == 200
    for one in (worker, *silent):
        one.close()


def test_a_request_has_its_answer_from_another_thread() -> None:
    """And none if there is none in time."""
    request = WorkerRequest({})
    assert request.wait(0.01) is None
    request.answer({"answer": "wait"})
    assert request.wait(0.01) == {"answer": "wait"}


def test_a_mistake_in_a_request_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread that ends by an exception of ours says so;
    only those of killed workers are silent.
    """

    def fail(request: WorkerRequest) -> None:
        raise KeyError("no such worker")

    server = Server("127.0.0.1", SECRET, fail, fail)
    connection = SignedConnection(("127.0.0.1", server.port), SECRET, 5.0)
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.post("/elastic/beat", BEAT)
    connection.close()
    server.close()
    assert "KeyError: 'no such worker'" in capfd.readouterr().err


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a/b\r\n",
        b"GET /a/b HTTP/2\r\n",
        b"GET /a/b HTTP/1.1\r\nno colon\r\n",
        b"GET /a/b HTTP/1.1\r\n" + b"x: y\r\n" * 100,
        b"GET /a/b HTTP/1.1\r\nx: " + b"y" * 70000 + b"\r\n",
    ],
)
def test_a_head_that_is_none_is_refused(server: Server, head: bytes) -> None:
    """400, and the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head + b"\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")


def threads(name: str) -> int:
    """Return how many threads bear a name that begins so."""
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


@pytest.fixture
def workers(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SignedConnection]]:
    """Connections that have sent a heartbeat, and pause."""
    monkeypatch.setattr(pauses, "_PROMPT_S", 10.0)  # longer than a worker waits here
    address = ("127.0.0.1", server.port)
    all_workers = [SignedConnection(address, SECRET, 5.0) for _ in range(4)]
    before = threads("Thread-")
    for worker in all_workers:
        assert worker.post("/elastic/beat", BEAT)[0] == 200
    wait_until(lambda: threads("Thread-") == before)
    yield all_workers
    for worker in all_workers:
        worker.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait at most 5 seconds."""
    end = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_connections_that_beat_share_a_thread(workers: list[SignedConnection]) -> None:
    """They are answered all the same, each with its own content."""
    for count in range(3):
        for step, worker in enumerate(workers):
            answer = json.loads(worker.post("/elastic/beat", BEAT | {"step": step + count})[1])
            assert answer["step"] == step + count
    # those of servers that were closed end
    wait_until(lambda: (threads("heartbeats"), threads("connection")) == (1, 0))


def test_a_request_that_takes_its_time_has_a_thread(
    workers: list[SignedConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for its rank on the same connection holds no heartbeat up."""
    monkeypatch.setattr(module, "POLL_S", 2.0)
    join = {key: BEAT[key] for key in ("worker", "generation")}
    join |= {"commit": 0, "replica_size": 1, "is_whole": True, "copies": 0}
    waits = threading.Thread(target=workers[0].post, args=("/elastic/join", join))
    waits.start()
    wait_until(lambda: threads("connection") == 1)
    assert workers[1].post("/elastic/beat", BEAT)[0] == 200
    assert waits.is_alive()
    waits.join()
    assert workers[0].post("/elastic/beat", BEAT)[0] == 200


@pytest.mark.parametrize(
    "part",
    [
        b"POST /elastic/beat HTTP/1.1\r\n",
        b"POST /elastic/beat HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
        b"POST /ela",
        b"\r\n\r\n",
    ],
)
def test_a_part_of_a_request_holds_no_heartbeat_up(
    server: Server, workers: list[SignedConnection], part: bytes
) -> None:
    """As from a worker that was stopped while it wrote."""
    workers[0]._http.sock.sendall(part)
    assert workers[1].post("/elastic/beat", BEAT)[0] == 200


def test_a_connection_that_paused_and_closed_leaves_nothing(
    server: Server, workers: list[SignedConnection]
) -> None:
    """Neither its thread nor its socket."""
    files = len(os.listdir("/proc/self/fd"))
    for worker in workers:
        worker.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == files - 2 * len(workers))
    wait_until(lambda: threads("connection") == 0)


def test_a_refused_heartbeat_ends_its_connection(workers: list[SignedConnection]) -> None:
    """A repeated or unsigned one, on a connection that sent signed ones before."""
    http = workers[0]._http
    http.request("POST", "/elastic/beat", json.dumps(BEAT), {HEADER: "00"})
    response = http.getresponse()
    assert response.status == 403
    assert response.read() == b""
    assert http.sock is None  # by its "Connection: close"
    assert workers[1].post("/elastic/beat", BEAT)[0] == 200


def test_a_silent_connection_is_closed(
    server: Server, workers: list[SignedConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a host that was lost says nothing."""
    monkeypatch.setattr(module._Handler, "timeout", 0.2)
    worker = workers[0]._http.sock
    assert worker.recv(1) == b""
