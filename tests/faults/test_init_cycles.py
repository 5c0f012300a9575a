"""trainkit's Horovod set up and taken down many times, left by a peer, and refused:
errors in Python, no abort and no hang.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

from tests.faults.jobs import WORKERS
from tests.helpers.launching import path, run_command

pytestmark = pytest.mark.parallel

RANK = WORKERS / "horovod_rank.py"
PAIR = f"horovodrun --gloo -np 2 python {RANK}"
SECRET = "5e" * 32


def said(text: str) -> list[Any]:
    """Return what ranks printed, without horovodrun's prefix."""
    return [
        json.loads(line[line.index("{") :])
        for line in text.splitlines()
        if "{" in line and line.endswith("}")
    ]


class Ranks:
    """A rendezvous server, and ranks that a test starts itself:
    horovodrun would end them all when one dies.
    """

    def __init__(self, handler: type[RendezvousHandler] = RendezvousHandler) -> None:
        self._server = RendezvousServer()
        self._port = self._server.start(handler, address="127.0.0.1")
        self._server.init([])
        self._started: list[subprocess.Popen[str]] = []

    def start(self, work: str, rank: int, size: int, scope: str = "g1.") -> subprocess.Popen[str]:
        """Start a rank of this host."""
        assignment = {
            "RANK": rank,
            "SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": size,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }
        where = {
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": self._port,
            "GLOO_IFACE": "lo",
        }
        how = {
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "HOSTNAME": "localhost",
            "RENDEZVOUS_SCOPE": scope,
        }
        env = {f"HOROVOD_{name}": str(value) for name, value in (assignment | where | how).items()}
        command = ["python", str(RANK), *work.split()]
        env = os.environ | env | {"PATH": path()}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        return process

    def keys(self) -> dict[str, Any]:
        """Return what the server holds."""
        return dict(self._server._httpd.cache)

    def end(self) -> None:
        """End what is left of the ranks, and the server."""
        for process in self._started:
            process.kill()
            process.communicate()
        self._server.stop()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A server for one test; it and its ranks end with the test."""
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET)
    started = Ranks()
    yield started
    started.end()


def first_line(process: subprocess.Popen[str]) -> Any:
    """Wait for the next line of a rank."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_init_and_shutdown_can_be_repeated(tmp_path: Path) -> None:
    """Two ranks under horovodrun set up, add and take down again and again:
    no refused connection, no abort, no hang, and no descriptor or thread is left by a cycle.
    """
    done = run_command(f"{PAIR} cycles 200", tmp_path)
    assert done.code == 0, done.text
    ranks = said(done.out)
    assert [facts["cycles"] for facts in ranks] == [200, 200]
    for facts in ranks:
        after_ten, after_all = facts["after"]
        assert after_all == pytest.approx(after_ten, abs=3), facts
    assert "exception" not in done.text


def test_a_rank_that_waits_leaves_its_processor_to_others(tmp_path: Path) -> None:
    """A rank sleeps while a peer is late."""
    done = run_command(f"{PAIR} sleep", tmp_path)
    assert done.code == 0, done.text
    (facts,) = said(done.text)
    assert facts["waited_s"] > 0.5
    assert facts["processor_s"] < 0.2 * facts["waited_s"]


def test_init_can_be_repeated_with_horovods_own_settings(tmp_path: Path) -> None:
    """Both settings of the environment are taken at each init;
    as released the second one writes past the end of a vector.
    """
    done = run_command(
        f"{PAIR} cycles 20", tmp_path, HOROVOD_FUSION_THRESHOLD="1048576", HOROVOD_CYCLE_TIME="0.5"
    )
    assert done.code == 0, done.text
    assert [facts["cycles"] for facts in said(done.out)] == [20, 20]


@pytest.mark.parametrize("shift", [1, 12345, 40001])
def test_float16_is_summed_exactly(shift: int, tmp_path: Path) -> None:
    """Rounded once, to nearest, as torch does:
    normal and subnormal numbers, zeros of both signs, infinities and NaN.
    """
    done = run_command(f"{PAIR} halves {shift}", tmp_path)
    assert done.code == 0, done.text
    assert [facts["different"] for facts in said(done.out)] == [0, 0]


def check_outlived(facts: Any, assignment: list[int]) -> None:
    """Assert the errors that a survivor got after its peer's death, and its next rank."""
    assert (facts["waiting"], facts["later"]) == ("HorovodInternalError", "HorovodInternalError")
    assert facts["later_ms"] < 5000  # no time limit is waited for: Gloo's is 30 s
    assert facts["shutdown_ms"] < 5000
    assert facts["assignment"] == assignment
    assert facts["ranks"] == assignment[1]


@pytest.mark.parametrize(("survivors", "victim"), [([0], 1), ([1], 0), ([0, 1], 2), ([1, 2], 0)])
def test_survivors_of_a_killed_peer_start_again(
    survivors: list[int], victim: int, ranks: Ranks
) -> None:
    """A rank blocked on a killed peer gets an error at once, shuts down,
    and becomes rank 0 of 1 in the same process.
    """
    size = len(survivors) + 1
    processes = {
        rank: ranks.start("wait" if rank == victim else f"outlive g{2 + rank}. 1", rank, size)
        for rank in range(size)
    }
    assert [first_line(process) for process in processes.values()] == size * [{"ready": True}]
    processes[victim].kill()
    for rank in survivors:
        check_outlived(first_line(processes[rank]), assignment=[0, 1, 0, 1])
        assert processes[rank].wait(20) == 0


def test_survivor_continues_with_a_newcomer(ranks: Ranks) -> None:
    """Rank 1 outlives rank 0, becomes rank 0 itself in the same process,
    and adds with a process that has just begun.
    """
    victim, survivor = ranks.start("wait", 0, 2), ranks.start("outlive g2. 2", 1, 2)
    assert first_line(victim) == first_line(survivor) == {"ready": True}
    victim.kill()
    newcomer = ranks.start("wait", 1, 2, scope="g2.")
    check_outlived(first_line(survivor), assignment=[0, 2, 0, 2])
    assert first_line(newcomer) == {"ready": True}


@pytest.mark.timeout(1200)  # sixty starts
def test_no_moment_of_a_death_hangs_the_survivor(ranks: Ranks) -> None:
    """In thirty deaths no survivor hangs,
    wherever its next sum meets the shutdown (one in ten hung on the GIL).
    """
    for generation in range(30):
        scope = f"x{generation}."
        pair = [
            ranks.start(work, rank, 2, scope)
            for rank, work in enumerate(("wait", f"outlive y{generation}. 1"))
        ]
        assert [first_line(process) for process in pair] == 2 * [{"ready": True}]
        pair[0].kill()
        check_outlived(first_line(pair[1]), assignment=[0, 1, 0, 1])


def test_refused_init_is_an_error_and_can_be_tried_again(ranks: Ranks) -> None:
    """A wrong secret, none, and a server that is not there are errors in words;
    then init works in the same process.
    """
    rank = ranks.start("retry", 0, 1)
    facts = first_line(rank)
    assert rank.wait(20) == 0
    wrong, missing, away = facts["errors"]
    assert "HOROVOD_RENDEZVOUS_SECRET of this process is not the server's" in wrong
    assert "HOROVOD_RENDEZVOUS_SECRET is not set" in missing
    assert "http://127.0.0.1:9 did not answer" in away
    assert facts["ranks"] == 1.0


class GivenUp(RendezvousHandler):
    """A driver that has formed another generation: no rank joins this one."""

    def do_GET(self) -> None:
        """Say so, signed."""
        if self._verified() is not None:
            self.send_status_code(410)


def test_init_of_a_scope_that_was_given_up_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a peer of an abandoned scope gets the server's
    410 instead of waiting for the limit of 30 s.
    """
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET)
    ranks = Ranks(GivenUp)
    try:
        rank = ranks.start("fail", 0, 2)
        facts = first_line(rank)
        assert "refuses GET /g1.global/1 (410)" in facts["error"]
        assert facts["ms"] < 15_000
        assert rank.wait(20) == 0
    finally:
        ranks.end()


class Stranger(RendezvousHandler):
    """Listens where the job's server was, and would end the rank at once."""

    def do_GET(self) -> None:
        """Answer without a signature."""
        self.send_status_code(410)


def test_answer_of_a_stranger_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks again, and in the end names the reason;
    it takes no value and no refusal without the job's signature.
    """
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET)
    ranks = Ranks(Stranger)
    try:
        assert (
            "in 3 attempts: an answer without this job's signature"
            in first_line(ranks.start("fail", 0, 2))["error"]
        )
    finally:
        ranks.end()


def test_rank_that_comes_late_is_named(tmp_path: Path) -> None:
    """Under Gloo the stall inspector names the missing rank and tensor,
    and the sum completes when the rank arrives.
    """
    done = run_command(f"{PAIR} late 5", tmp_path, HOROVOD_STALL_CHECK_TIME_SECONDS="2")
    assert done.code == 0, done.text
    assert "1: [allreduce.awaited]" in done.text
    assert [facts["late"] for facts in said(done.out)] == 2 * ["no error: 2.0"]


def test_rank_that_does_not_come_ends_the_wait(tmp_path: Path) -> None:
    """A wait longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ends with an error."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    done = run_command(f"{PAIR} late 8", tmp_path, **limits)
    assert "1!: [allreduce.awaited]" in done.text
    assert [facts["late"] for facts in said(done.out)] == 2 * ["HorovodInternalError"]


def test_scopes_are_cleared_behind_the_ranks(ranks: Ranks) -> None:
    """The ranks' keys are removed from the store once they are connected,
    so that many cycles do not fill the server.
    """
    done = [ranks.start("cycles 3", rank, 2) for rank in (0, 1)]
    assert [process.wait(30) for process in done] == [0, 0]
    assert ranks.keys() == {}
