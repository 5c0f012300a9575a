"""Jobs on two hosts with addresses, names, cards and disks of their own:
what works, and what is refused with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.conftest import Make
from tests.hosts.jobs import Job, job_of, needs_ssh
from trainkit.version import __version__

pytestmark = pytest.mark.parallel


def connections(job: Job) -> str:
    """Return the connections between processes of Python on the second host."""
    asked = subprocess.run(
        [*job.hosts.on(1), "ss", "-tnp"], capture_output=True, text=True, check=True
    )
    return "\n".join(
        line for line in asked.stdout.splitlines() if "python" in line or "pt_main" in line
    )


def check_end(job: Job) -> None:
    """Check that a job of one epoch ended well, and that nothing of it is left."""
    assert job.end() == 0, job.text
    job.check_samples(epochs=1)
    assert job.left() == []


@needs_ssh
def test_horovodrun_trains_on_each_sample_once(make_hosts: Make, tmp_path: Path) -> None:
    """With fixed ranks, on hosts with two cards each, which Horovod finds by itself;
    the status names the hosts.
    """
    hosts = make_hosts(spare=True)
    with job_of(hosts, tmp_path, "static") as job:
        check_end(job)
        found = job.status()
        assert found.progress is not None and found.state == "ended"
        assert sorted(found.progress.hosts) == [hosts.address(0), hosts.address(1)]


@needs_ssh
@pytest.mark.parametrize(
    ("words", "used", "unused"),
    [
        pytest.param([], "10.78.0.", "10.79.0.", id="by-route"),
        pytest.param(["--network-interface", "spare"], "10.79.0.", "10.78.0.", id="by-name"),
    ],
)
def test_the_card_that_leads_to_the_hosts_is_taken(
    words: list[str], used: str, unused: str, make_hosts: Make, tmp_path: Path
) -> None:
    """In an elastic job: by the route to the hosts' addresses, or the one that is named;
    the other carries nothing.
    """
    with job_of(make_hosts(spare=True), tmp_path, "elastic", words, pace_s=0.1) as job:
        seen = connections(job)
        assert used in seen and unused not in seen, seen
        check_end(job)


@pytest.mark.parametrize(
    "words", [[], ["--network-interfaces", "driver=bond0,wire"]], ids=["by-route", "by-name"]
)
def test_the_launchers_card_has_another_name(
    words: list[str], make_hosts: Make, tmp_path: Path
) -> None:
    """A login node's bond0 and the hosts' wire:
    each worker takes the card by which it reaches the driver, or the named one.
    """
    with job_of(make_hosts(launcher_card="bond0"), tmp_path, "elastic", words) as job:
        check_end(job)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--network-interface", "eth7"],
            "'eth7', which has no IPv4 address here (No such device); interfaces: lo, wire",
        ),
        (
            ["-H", "[fd78::2]:1,[fd78::3]:1"],
            "'[fd78::2]:1', an IPv6 address. Horovod's ranks connect over IPv4: give",
        ),
        (["-H", "host7:1"], "--hosts names 'host7', of which no address can be looked up here"),
        (["-H", "10.78.0.9:2"], "no host can be reached by ssh (10.78.0.9)"),
    ],
    ids=["interface", "ipv6", "name", "address"],
)
def test_what_cannot_work_is_refused(
    words: list[str], text: str, make_hosts: Make, tmp_path: Path
) -> None:
    """Before any process is started; the message names what was given."""
    with job_of(make_hosts(ipv6=True), tmp_path, "elastic", words, wait_for_start=False) as job:
        assert job.end() != 0
        assert text in job.text, job.text
        assert job.left() == []


def test_hosts_without_a_shared_folder_are_found_before_training(
    make_hosts: Make, tmp_path: Path
) -> None:
    """An elastic job is refused, since its rank 0 may move:
    the folder, the host and the remedy are named.
    """
    own = tmp_path / "run"
    own.mkdir()
    with job_of(make_hosts(own_folder=own), tmp_path, "elastic", wait_for_start=False) as job:
        assert job.end() == 2, job.text
        assert job.text.count("does not see it: it is not shared between the hosts") == 1, job.text
        assert "callbacks.checkpoint.dirpath=s3://" in job.text and job.step[0] == -1
        assert job.left() == []


def test_fixed_ranks_without_a_shared_folder_train(make_hosts: Make, tmp_path: Path) -> None:
    """Under torchrun rank 0 alone writes:
    the host that has the files is named, and each sample counts once.
    """
    own = tmp_path / "run"
    own.mkdir()
    with job_of(make_hosts(own_folder=own), tmp_path, "torchrun") as job:
        check_end(job)
        assert "and host1 does not see it: the run's files are on host0 alone" in job.text
        seen = subprocess.run(
            [*job.hosts.on(0), "ls", str(own)], capture_output=True, text=True, check=True
        ).stdout
        assert "checkpoints" in seen and "progress.json" in seen and list(own.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("trainkit's", "import trainkit.version as v; v.__version__ = '0.0.1'"),
        ("torch's", "import torch; torch.__version__ = '2.9.0'"),
        (
            "horovod's",
            (
                "import importlib.metadata as m; f = m.version; m.version = lambda n: '0.27.0' if n"
                " == 'horovod' else f(n)"
            ),
        ),
    ],
    ids=["trainkit", "torch", "horovod"],
)
def test_hosts_of_other_versions_are_found_before_training(
    what: str, change: str, make_hosts: Make, tmp_path: Path
) -> None:
    """Both versions and the ranks are named.
    The second host reports another version: its packages are this one's.
    """
    program = tmp_path / "python"
    run = (
        "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0],"
        " run_name='__main__')"
    )
    program.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = host1 ] || exec {sys.executable} "$@"\nexec {sys.executable}'
        f' -c "{change}; {run}" "$@"\n'
    )
    program.chmod(0o755)
    with job_of(
        make_hosts(), tmp_path, "elastic", program=[str(program)], wait_for_start=False
    ) as job:
        assert job.end() == 1, job.text
        assert (
            "Ranks differ in what must be equal on all: " in job.text
            and f"{what} version is " in job.text
        ), job.text
        other = {
            "trainkit's": (__version__, "0.0.1"),
            "torch's": ("", "2.9.0"),
            "horovod's": ("0.28.1", "0.27.0"),
        }[what]
        assert all(version in job.text for version in other), job.text
        assert job.step[0] == -1 and job.left() == []
