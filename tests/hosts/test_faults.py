"""Faults between two hosts: a cable, a host, a driver, a network that is split.
No sample is lost or trained on twice.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hosts.conftest import Make
from tests.hosts.jobs import Job, job_of, needs_ssh

pytestmark = pytest.mark.parallel

LONG = 8  # epochs of a job that is not done before its fault is over


def finish(job: Job, epochs: int) -> None:
    """Check that a job ends well, with each sample counted once in each epoch,
    and leaves nothing.
    """
    assert job.end() == 0, job.text[-3000:]
    job.check_samples(epochs)
    assert job.left() == []


def resume(job: Job, folder: Path, launcher: str, epochs: int = 2) -> None:
    """Start a job again that has ended,
    and check that it resumes from its checkpoint, and its end.
    """
    with job_of(job.hosts, folder, launcher, epochs=epochs) as again:
        finish(again, epochs)
        found = again.status().progress
        assert (
            found is not None and found.starts[-1].how == "resume" and found.starts[-1].step >= 10
        )


def test_a_cable_that_is_back_after_seconds_costs_nothing(make_hosts: Make, tmp_path: Path) -> None:
    """TCP sends again what was lost: the ranks stay, and the status shows that they wait."""
    with job_of(make_hosts(), tmp_path, "elastic", epochs=2, pace_s=0.05) as job:
        job.reach(12)
        job.hosts.cut(1)
        job.wait_for(
            "a pause", lambda: (found := job.status().progress) is not None and found.still_s > 3
        )
        job.hosts.mend(1)
        finish(job, epochs=2)
        assert "generation 2" not in job.text


@pytest.mark.parametrize("launcher", ["elastic", "torchrun"])
def test_a_link_that_loses_packets_costs_time_alone(
    launcher: str, make_hosts: Make, tmp_path: Path
) -> None:
    """One in twenty, in both directions:
    TCP sends them again, the ranks stay, and each sample counts once.
    """
    hosts = make_hosts()
    if not hosts.thin(1, 0.05):
        pytest.skip("no iptables, or its module `statistic` is missing")
    with job_of(hosts, tmp_path, launcher, epochs=1) as job:
        finish(job, epochs=1)
        assert "generation 2" not in job.text
    assert hosts.dropped(1) > 20


def test_a_killed_driver_ends_its_workers(make_hosts: Make, tmp_path: Path) -> None:
    """On both hosts, with a checkpoint; the same command resumes."""
    with job_of(make_hosts(), tmp_path, "elastic", epochs=2, pace_s=0.1) as job:
        job.reach(12)
        job.processes[0].send_signal(signal.SIGKILL)
        job.wait_for("the end of the workers", lambda: job.left() == [])
        assert job.status().state == "stopped"
        resume(job, tmp_path, "elastic")


@pytest.mark.parametrize("fault", ["cable", "host"])
def test_a_host_that_is_cut_off_is_done_without_and_comes_back(
    fault: str, make_hosts: Make, tmp_path: Path
) -> None:
    """ssh notices after a minute; the other host continues, and both again once it is back."""
    with job_of(make_hosts(), tmp_path, "elastic", epochs=LONG, pace_s=0.05) as job:
        job.reach(12)
        job.set_pace(2.0)  # the job must not end before a worker that starts slowly has joined
        (job.hosts.cut if fault == "cable" else job.hosts.lose)(1)
        job.wait_for("one rank", lambda: job.step[1] == 1)
        (job.hosts.mend if fault == "cable" else job.hosts.make)(1)
        job.wait_for("two ranks", lambda: job.step[1] == 2)
        job.set_pace(0.0)
        finish(job, LONG)


def test_hosts_that_do_not_see_each_other_wait(make_hosts: Make, tmp_path: Path) -> None:
    """The driver sees both: none trains on alone, the status says that they wait,
    and the job continues after it.
    """
    with job_of(make_hosts(), tmp_path, "elastic", epochs=2, pace_s=0.05) as job:
        job.reach(12)
        job.hosts.split(0, 1)
        job.wait_for("a wait", lambda: job.status().state == "waiting", 90)
        step = job.step
        job.hosts.join(0, 1)
        finish(job, 2)
        assert step[1] == 2


def test_a_driver_that_is_cut_off_loses_its_workers_and_finds_them_again(
    make_hosts: Make, tmp_path: Path
) -> None:
    """The workers end by themselves;
    the driver starts others once it reaches the hosts, which resume from the checkpoint.
    """
    with job_of(make_hosts(), tmp_path, "elastic", epochs=2, pace_s=0.05) as job:
        job.reach(12)
        for host in (0, 1):
            job.hosts.split_driver(host)
        job.wait_for("the end of the workers", lambda: job.left() == [], 150)
        for host in (0, 1):
            job.hosts.join_driver(host)
        finish(job, 2)


@pytest.mark.parametrize("launcher", [pytest.param("static", marks=needs_ssh), "torchrun"])
def test_fixed_ranks_end_when_a_host_is_lost_and_resume(
    launcher: str, make_hosts: Make, tmp_path: Path
) -> None:
    """Within Gloo's limit; torch's is half an hour, so there the watchdog ends them.
    The same command resumes.
    """
    is_watched = launcher == "torchrun"
    with job_of(
        make_hosts(), tmp_path, launcher, epochs=2, pace_s=0.05, watchdog=is_watched
    ) as job:
        job.reach(12)
        job.hosts.lose(1)
        job.wait_for("the end", lambda: job.code is not None and job.left() == [], 200)
        assert not is_watched or "Error: rank 1 (host1" in job.text, job.text[-3000:]
        job.hosts.make(1)
        resume(job, tmp_path, launcher)
