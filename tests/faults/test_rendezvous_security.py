"""A process without the secret, on the same machine,
can neither change nor read a job on trainkit's Horovod.
"""

from __future__ import annotations

import http.server
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.common.util.codec import dumps_base64
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http import http_client, signature
from horovod.runner.http.http_server import (
    SINGLE_REQUEST_TIMEOUT,
    BoundedHTTPServer,
    KVStoreServer,
    RendezvousServer,
)

from tests.faults.jobs import WORKERS, wait_for
from tests.helpers.launching import BIN, run_command
from trainkit.extensions.elastic import signing

pytestmark = pytest.mark.parallel

RANK = WORKERS / "horovod_rank.py"
SECRET = "5e" * 32


class Payload:
    """A pickle that touches a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


NONCE = f"{'ab' * 16}.1"


def answer(
    method: str, url: str, body: bytes = b"", signature: str | None = None, **more: str
) -> int:
    """Send a request and return the status of its answer."""
    headers = {} if signature is None else {signing.HEADER: signature, signing.NONCE: NONCE}
    headers |= more
    request = urllib.request.Request(url, data=body or None, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answered:
            return int(answered.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def attacks(target: str, body: bytes) -> list[tuple[str, bytes, str | None]]:
    """Return requests that must be refused: without a signature, and with one of something else."""
    wrong = [
        signing.sign("0" * 64, "PUT", target, NONCE, body),
        signing.sign(SECRET, "PUT", target, NONCE, b"another body"),
        signing.sign(SECRET, "PUT", "/another/key", NONCE, body),
        signing.sign(SECRET, "GET", target, NONCE, body),
        "\xe9",
        "",
    ]
    unsigned = [("PUT", body, None), ("GET", b"", None), ("DELETE", b"", None)]
    return [*unsigned, *(("PUT", body, signature) for signature in wrong)]


@dataclass(frozen=True)
class Job:
    """A job of two ranks under horovodrun. `folders`: /proc/<pid> of all its processes."""

    folders: list[Path]
    port: int
    secret: str


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a process; empty where it is gone."""
    try:
        pairs = (folder / "environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job whose ranks wait, started without a secret in the user's environment."""
    out = tmp_path_factory.mktemp("job") / "out"
    mark = f"security-{os.getpid()}"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "TRAINKIT_TEST_JOB": mark}
    with out.open("wb") as file:
        command = ["horovodrun", "--gloo", "-np", "2", sys.executable, str(RANK), "wait"]
        launcher = subprocess.Popen(
            command, env=env, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for(lambda: out.read_text().count('"ready"') == 2, "the start of two ranks")
        ours = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        ours = [
            folder for folder in ours if environment_of(folder).get("TRAINKIT_TEST_JOB") == mark
        ]
        ranks = [env for env in map(environment_of, ours) if "HOROVOD_RANK" in env]
        yield Job(ours, int(ranks[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]), ranks[0][signing.SECRET])
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(30)


def listeners(port: int) -> list[str]:
    """Return the addresses at which a port of this machine is open, as /proc/net writes them."""
    rows = [
        row.split()
        for file in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    return [
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    ]


def test_port_of_a_local_job_is_open_on_loopback_only(job: Job) -> None:
    """If all ranks are on this machine, no other machine can connect."""
    assert listeners(job.port) == ["0100007F"]


def test_secret_is_on_no_command_line(job: Job) -> None:
    """The arguments of launcher, helpers and ranks,
    which every user of the machine can read, hold no secret.
    """
    lines = [(folder / "cmdline").read_bytes() for folder in job.folders]
    assert len([line for line in lines if b"horovod_rank.py" in line]) >= 3
    assert len(job.secret) == 64
    assert not [line for line in lines if job.secret.encode() in line]


def test_running_job_refuses_strangers(job: Job, tmp_path: Path) -> None:
    """Each request without the right signature gets a 403;
    what it brought is neither kept nor run.
    """
    target = "/worker_addresses/localhost:0"
    body = dumps_base64(Payload(tmp_path / "was-run"), to_ascii=False)
    url = f"http://127.0.0.1:{job.port}{target}"
    assert {answer(method, url, sent, given) for method, sent, given in attacks(target, body)} == {
        403
    }
    assert answer("GET", url, signature=signing.sign(job.secret, "GET", target, NONCE)) == 404
    assert not (tmp_path / "was-run").exists()


def test_head_shows_no_files_of_the_launchers_folder(job: Job) -> None:
    """The server refuses HEAD, which would list the files of the launcher's folder."""
    assert answer("HEAD", f"http://127.0.0.1:{job.port}/") == 501


SSH = """\
#!/bin/bash
# Stands in for ssh: notes its arguments, and runs the command in an environment that has nothing of ours.
echo "$*" >> {log}
host=
while [ $# -gt 0 ]; do
  case "$1" in -o|-p|-i) shift 2;; *) [ -n "$host" ] && break; host=$1; shift;; esac
done
exec env -i HOME="$HOME" PATH="$PATH" /bin/bash -c "$*"
"""


def test_other_hosts_get_the_secret_by_standard_input(tmp_path: Path) -> None:
    """A rank that is started by ssh knows the job's secret, and ssh's arguments do not."""
    (tmp_path / "ssh").write_text(SSH.format(log=tmp_path / "log"))
    (tmp_path / "ssh").chmod(0o700)
    where = "-H localhost:1,no-such-host.invalid:1 --network-interface lo --disable-cache"
    line = f"PATH={tmp_path}:$PATH horovodrun --gloo -np 2 {where} {sys.executable} {RANK} cycles 1"
    done = run_command(line, tmp_path, 60, **{signing.SECRET: SECRET})
    assert done.code == 0, done.text
    assert done.out.count('"cycles": 1') == 2
    assert str(RANK) in (tmp_path / "log").read_text()
    assert SECRET not in (tmp_path / "log").read_text()


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """The secret of the servers that a test starts in this process."""
    monkeypatch.setenv(signing.SECRET, SECRET)
    return SECRET


class Driver:
    """Stands in for the elastic driver, which collects the addresses of workers."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def register_worker_server(self, *facts: Any) -> None:
        """Note what came."""
        self.received.append(facts)


def test_elastic_handler_unpickles_nothing_of_a_stranger(secret: str, tmp_path: Path) -> None:
    """Horovod's elastic handler, which unpickles what workers PUT,
    refuses an unsigned pickle (CVE-2024-10190).
    """
    driver, server = Driver(), RendezvousServer()
    port = server.start(create_rendezvous_handler(driver), address="127.0.0.1")
    try:
        target = "/worker_addresses/localhost:0"
        body = dumps_base64((Payload(tmp_path / "was-run"), b""), to_ascii=False)
        for method, sent, given in attacks(target, body):
            if method == "PUT":
                assert answer(method, f"http://127.0.0.1:{port}{target}", sent, given) == 403
        assert not (tmp_path / "was-run").exists()
        assert driver.received == []
        http_client.put_data_into_kvstore(
            "127.0.0.1", port, "worker_addresses", "localhost:0", ({"lo": []}, b"key")
        )
        assert driver.received == [("localhost", 0, {"lo": []}, b"key")]
    finally:
        server.stop()


@pytest.fixture
def store(secret: str) -> Iterator[int]:
    """The port of a key-value store, as horovod.run() starts it."""
    server = KVStoreServer(verbose=0)
    yield server.start_server("127.0.0.1")
    server.shutdown_server()


def test_large_body_of_a_stranger_is_not_read(store: int) -> None:
    """A body above 1 MiB needs a signed length, and a length is a number of at most 15 digits."""
    url = f"http://127.0.0.1:{store}/scope/key"
    large, signed = str(2**20 + 1), signing.sign(SECRET, "PUT", "/scope/key", NONCE, b"x")
    begun = time.monotonic()
    assert answer("PUT", url, b"x", signed, **{"Content-Length": large}) == 413
    assert (
        answer(
            "PUT", url, b"x", signed, **{"Content-Length": large, signature.LENGTH_HEADER: signed}
        )
        == 413
    )
    for length in ("9" * 5000, "-1", "1e3", ""):
        assert answer("PUT", url, b"x", signed, **{"Content-Length": length}) == 400
    assert time.monotonic() - begun < SINGLE_REQUEST_TIMEOUT, "it waited for a body"
    http_client.put_data_into_kvstore("127.0.0.1", store, "scope", "key", b"x" * 2**21)
    assert http_client.read_data_from_kvstore("127.0.0.1", store, "scope", "key") == b"x" * 2**21


def test_request_counts_once(store: int) -> None:
    """Recorded and sent again, it is refused."""
    signed = signing.sign(SECRET, "PUT", "/scope/key", NONCE, b"x")
    assert [
        answer("PUT", f"http://127.0.0.1:{store}/scope/key", b"x", signed) for _ in range(2)
    ] == [200, 403]


def test_silent_clients_hold_no_server(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread of its own, and the oldest gives way if there are too many."""
    monkeypatch.setattr(BoundedHTTPServer, "most_connections", 2)
    silent = [socket.create_connection(("127.0.0.1", store), timeout=2) for _ in range(3)]
    begun = time.monotonic()
    assert silent[0].recv(1) == b""
    assert answer("GET", f"http://127.0.0.1:{store}/scope/key") == 403
    assert time.monotonic() - begun < SINGLE_REQUEST_TIMEOUT
    for one in silent:
        one.close()


def test_results_of_functions_come_from_ranks_only(secret: str, tmp_path: Path) -> None:
    """The key-value store from which horovod.run() unpickles results takes those of ranks only."""
    server = KVStoreServer(verbose=0)
    port = server.start_server("127.0.0.1")
    try:
        assert listeners(port) == ["0100007F"]
        body = dumps_base64(Payload(tmp_path / "was-run"), to_ascii=False)
        assert answer("PUT", f"http://127.0.0.1:{port}/runfunc_result/0", body) == 403
        with pytest.raises(RuntimeError, match="failed"):
            http_client.read_data_from_kvstore("127.0.0.1", port, "runfunc_result", "0")
        http_client.put_data_into_kvstore("127.0.0.1", port, "runfunc_result", "0", [1, 2])
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "runfunc_result", "0") == [
            1,
            2,
        ]
        assert not (tmp_path / "was-run").exists()
    finally:
        server.shutdown_server()


class Impostor(http.server.BaseHTTPRequestHandler):
    """Answers each GET with a pickle, signed with a secret that is not the job's, or with none."""

    body = b""
    secret = ""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        if self.secret:
            self.send_header(
                signing.HEADER,
                signing.sign(
                    self.secret, "ANSWER 200", self.path, self.headers[signing.NONCE], self.body
                ),
            )
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("known", ["", "0" * 64], ids=["no secret", "another secret"])
def test_rank_unpickles_no_answer_of_a_stranger(known: str, secret: str, tmp_path: Path) -> None:
    """A rank unpickles no answer of a server that does not know the secret."""
    body = dumps_base64(Payload(tmp_path / "was-run"), to_ascii=False)
    handler = type("Handler", (Impostor,), {"body": body, "secret": known})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(RuntimeError, match="does not know the secret"):
            http_client.read_data_from_kvstore("127.0.0.1", server.server_port, "runfunc", "func")
    assert not (tmp_path / "was-run").exists()


def test_both_sides_of_trainkit_sign_alike() -> None:
    """Horovod's signing module and trainkit's sign a request alike."""
    names = ("HEADER", "NONCE", "SECRET")
    assert [getattr(signature, name) for name in names] == [
        getattr(signing, name) for name in names
    ]
    assert signature.answer_to(200) == signing.answer_to(200)
    request = ("PUT", "/g3.global/0", NONCE, pickle.dumps({"a": 1}))
    assert signature.sign(SECRET, *request) == signing.sign(SECRET, *request)
    assert signature.is_signed(SECRET, *request, signing.sign(SECRET, *request))
    assert not signature.is_signed(SECRET, *request, None)
