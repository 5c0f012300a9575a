"""A worker's side of an elastic job: ranks, heartbeats, and a driver that is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.errors import Dismissed, JobEnded
from trainkit.extensions.elastic import client as membership
from trainkit.extensions.elastic.client import DriverLink, Membership, RankAssignment
from trainkit.extensions.elastic.rendezvous import Server, WorkerRequest

SECRET = "ab" * 32
SEAT = RankAssignment(
    generation=3, rank=1, size=4, local_rank=1, local_size=2, cross_rank=0, cross_size=2
)


class Driver:
    """A driver with scripted answers that records requests."""

    def __init__(self) -> None:
        self.joins: list[dict[str, Any]] = []
        self.beats: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.reply = {"wanted": 0, "dump": False, "why": "", "broken": False}
        self.server = Server("127.0.0.1", SECRET, self._join, self._beat)

    def _join(self, request: WorkerRequest) -> None:
        self.joins.append(request.content)
        request.answer(self.answers.pop(0))

    def _beat(self, request: WorkerRequest) -> None:
        self.beats.append(request.content)
        request.answer(self.reply)

    def member(self, secret: str = SECRET) -> Membership:
        """Return a worker of this driver."""
        return Membership("node1/0#1", ("127.0.0.1", self.server.port), secret)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver with workers that send heartbeats often."""
    monkeypatch.setattr(membership, "BEAT_S", 0.01)
    monkeypatch.setattr(membership, "UNREACHABLE_S", 0.3)
    monkeypatch.setattr(membership, "_PAUSE_S", 0.01)
    one = Driver()
    yield one
    one.server.close()


def wait(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not happen within 5 s")


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an hour pass at once."""
    monkeypatch.setattr(
        membership,
        "time",
        SimpleNamespace(
            monotonic=lambda: time.monotonic() + 3600, sleep=time.sleep, time=time.time
        ),
    )


def test_a_rank_sets_horovods_variables() -> None:
    """All that hvd.init() reads, and the generation as the scope of its keys."""
    assert SEAT.environment() == {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_RENDEZVOUS_SCOPE": "g3.",
    }


def test_outside_an_elastic_job_there_is_no_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none outside, and one for the whole process inside."""
    monkeypatch.setattr(Membership, "_current", None)
    monkeypatch.delenv("TRAINKIT_WORKER", raising=False)
    assert Membership.current() is None
    for name, value in {
        "TRAINKIT_WORKER": "node1/0#1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
        "HOROVOD_RENDEZVOUS_SECRET": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    one = Membership.current()
    assert one is not None and one.worker == "node1/0#1" and Membership.current() is one


def test_an_incomplete_environment_is_named() -> None:
    """The message has the missing variable, and the remedy."""
    with pytest.raises(JobEnded, match="HOROVOD_GLOO_RENDEZVOUS_ADDR.*horovodrun --min-np"):
        Membership.of({"TRAINKIT_WORKER": "node1/0#1"})


def test_join_asks_until_there_is_a_rank(driver: Driver) -> None:
    """ "wait" means to ask again; the request has the newest commit and the last generation."""
    driver.answers = [{"answer": "wait"}, {"answer": "wait"}, {"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    assert m.join(7) == SEAT and m.generation == 3
    alone = {"replica_size": 1, "is_whole": True, "copies": 0}
    asked = {"worker": "node1/0#1", "commit": 7, "generation": 0} | alone
    assert driver.joins == [asked] * 3
    driver.answers = [{"answer": "rank"} | vars(SEAT) | {"generation": 4}]
    m.join(9)
    assert driver.joins[-1] == asked | {"commit": 9, "generation": 3}


def test_a_worker_that_is_not_needed_ends_with_0(driver: Driver) -> None:
    """Dismissed is a SystemExit with the reason."""
    driver.answers = [{"answer": "leave", "why": "slot 0 of node1 was removed"}]
    with pytest.raises(Dismissed) as caught:
        driver.member().join(0)
    assert caught.value.code == 0 and caught.value.text == "slot 0 of node1 was removed"


def test_a_worker_of_a_job_that_is_over_hears_why(driver: Driver) -> None:
    """JobEnded is an error."""
    driver.answers = [{"answer": "end", "why": "rank 1 ended with exit code 3"}]
    with pytest.raises(JobEnded, match="rank 1 ended with exit code 3"):
        driver.member().join(0)


def test_beats_tell_what_the_main_thread_does(driver: Driver) -> None:
    """Step, progress, what it waits for, and its stall limit."""
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    m.join(0)
    m.step, m.progress, m.waiting, m.stall_s = 20, 41, "grads", 60.0
    said = {
        "worker": "node1/0#1",
        "generation": 3,
        "step": 20,
        "progress": 41,
        "waiting": "grads",
        "stall_s": 60.0,
        "raised": False,
    }
    wait(lambda: driver.beats[-1:] == [said])


def test_a_newer_generation_is_wanted_until_it_is_there(driver: Driver) -> None:
    """The driver's request arrives with the next heartbeat, and is fulfilled by joining;
    an old request is ignored.
    """
    driver.answers = [
        {"answer": "rank"} | vars(SEAT),
        {"answer": "rank"} | vars(SEAT) | {"generation": 4},
    ]
    m = driver.member()
    m.join(0)
    assert not m.wanted
    driver.reply = {"wanted": 4, "dump": False, "why": "worker node2/0#1 came", "broken": False}
    wait(lambda: m.wanted)
    assert m.why == "worker node2/0#1 came"
    m.join(1)
    assert not m.wanted


def test_a_request_for_stacks_calls_on_dump(driver: Driver) -> None:
    """From the beating thread: the main thread may hang."""
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    threads: list[str] = []
    m.on_dump = lambda: threads.append(threading.current_thread().name)
    driver.reply = {"wanted": 0, "dump": True, "why": "", "broken": False}
    m.join(0)
    wait(lambda: "membership" in threads)


def test_a_heartbeat_without_an_answer_is_followed_by_others(driver: Driver) -> None:
    """A driver that is busy for 10 s answers "wait";
    the thread that reads it lives on, and obeys the next answer.
    """
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    driver.reply = {"answer": "wait"}
    m = driver.member()
    m.join(0)
    wait(lambda: len(driver.beats) > 2)
    assert not m.wanted
    driver.reply = {"wanted": 4, "dump": False, "why": "worker node2/0#1 came", "broken": False}
    wait(lambda: m.wanted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_heartbeats_survive_what_fails_between_them(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    """As stacks that a full disk does not take:
    printed once, and the healthy worker does not become a silent one.
    """
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    driver.reply = {"wanted": 0, "dump": True, "why": "", "broken": False}
    dumps: list[int] = []

    def dump() -> None:
        dumps.append(len(driver.beats))
        raise OSError(28, "No space left on device")

    m = driver.member()
    m.on_dump = dump
    m.join(0)
    wait(lambda: len(dumps) > 2)
    driver.reply = {"wanted": 4, "dump": False, "why": "", "broken": False}
    wait(lambda: m.wanted)
    assert capfd.readouterr().err.count("The heartbeats continue.") == 1


def test_a_driver_that_is_gone_ends_the_job(driver: Driver) -> None:
    """With a silent driver, join is requested and raises the reason."""
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    m.join(0)
    driver.server.close()
    m.link = DriverLink(
        ("127.0.0.1", 1), SECRET
    )  # no process listens there, as at a dead driver's port
    wait(lambda: m.wanted)
    with pytest.raises(JobEnded, match="could not be reached for 0.3 s .*it was killed"):
        m.join(1)


def test_a_process_that_was_stopped_itself_does_not_blame_the_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time without heartbeats is not time of failed heartbeats:
    SIGSTOP, or a main thread that blocks all others.
    """
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    monkeypatch.setattr(membership, "BEAT_S", 60.0)
    m = driver.member()
    m.join(0)
    jump(monkeypatch)
    assert not m.wanted


def test_a_driver_that_is_away_for_a_moment_is_asked_again(driver: Driver) -> None:
    """Failed connections are retried."""
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    link, m.link = m.link, DriverLink(("127.0.0.1", 1), SECRET)
    threading.Timer(0.1, setattr, (m, "link", link)).start()
    assert m.join(0) == SEAT


def test_heartbeats_continue_after_the_driver_hung_up(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken connection is reopened, and a failure long ago is no silence."""
    driver.answers = [{"answer": "rank"} | vars(SEAT)]
    m = driver.member()
    m.join(0)
    wait(lambda: len(driver.beats) > 2)
    for connection in list(driver.server._http._known):
        connection.shutdown(socket.SHUT_RDWR)
    before = len(driver.beats)
    wait(lambda: len(driver.beats) > before + 5)
    jump(monkeypatch)
    assert not m.wanted


def test_a_wrong_secret_is_refused(driver: Driver) -> None:
    """403 is no reason to ask for a minute."""
    with pytest.raises(JobEnded, match="403 Forbidden"):
        driver.member(secret="cd" * 32).join(0)


@pytest.mark.parametrize(
    ("ranks", "stall_s", "seconds"),
    [(0, None, 0.5), (128, None, 0.5), (1024, None, 4.0), (4096, 300.0, 16.0), (4096, 4.0, 1.0)],
)
def test_workers_of_a_large_job_beat_less_often(
    ranks: int, stall_s: float | None, seconds: float
) -> None:
    """The driver answers as many heartbeats a second as of 128 ranks; none counts as frozen."""
    assert membership.beat_s(ranks, stall_s) == seconds


@pytest.mark.parametrize(
    ("interval_s", "now", "seconds"),
    [(0.5, 1000.0, 0.5), (0.5, 1000.04, 0.46), (0.5, 1000.1, 0.525), (0.02, 1000.001, 0.019)],
)
def test_heartbeats_of_workers_come_together(interval_s: float, now: float, seconds: float) -> None:
    """By the clock of all hosts: the driver's processor sleeps between two bursts of them."""
    assert membership.until_beat_s(interval_s, now) == pytest.approx(seconds)


def test_a_worker_that_is_to_join_again_beats_often(driver: Driver) -> None:
    """Also one of a large job, since its main thread may wait for ranks that are gone."""
    member = driver.member()
    member.ranks = 10**9  # its next heartbeat would be in hours
    driver.reply["wanted"] = 1
    member.beat()
    wait(lambda: len(driver.beats) > 2)
