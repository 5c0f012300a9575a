"""The elastic driver with real processes: workers are killed, frozen, added and removed.
They only pretend to train.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from tests.faults.jobs import ROOT, WORKERS, wait_for

pytestmark = pytest.mark.parallel

_MARK = "TRAINKIT_TEST_COMMAND"


@dataclass(frozen=True)
class Entry:
    """One line of the workers' log (workers/member.py)."""

    event: str
    worker: str
    pid: int
    generation: int
    rank: int
    size: int
    step: int


class Job:
    """A job under the driver; a context manager that fails if it leaves a process behind."""

    def __init__(
        self,
        folder: Path,
        options: str = "-np 2 --min-np 1",
        steps: int = 10**6,
        **environment: str,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
        command = [sys.executable, str(WORKERS / "member.py"), str(folder), str(steps)]
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainkit.launch.elastic", *options.split(), *command],
                cwd=folder,
                env=env | {"PYTHONPATH": str(ROOT), _MARK: self.mark} | environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = self.process.poll() is not None
        end = time.monotonic() + (1 if ended else 0)
        while (left := list(self.left())) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if kind is not None:
            print(self.err, *self.log(), sep="\n")  # pytest shows it with the failure
        else:
            assert ended, "the job was to end"
            assert left == [], "processes outlived the job"

    def left(self) -> Iterator[int]:
        """Yield the processes that the job has started, and itself, while they live."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # gone by now, or not ours
                    if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(
                        b"\0"
                    ):
                        yield int(folder.name)

    def log(self, event: str = "") -> list[Entry]:
        """Return the lines that workers have written."""
        if not (self.folder / "log").exists():
            return []
        whole = [line.split() for line in (self.folder / "log").read_text().splitlines() if line]
        return [
            Entry(w[0], w[1], *map(int, w[2:]))
            for w in whole
            if len(w) == 7 and w[0].startswith(event)
        ]

    def ranks(self, size: int, generation: int = 1) -> list[Entry]:
        """Wait for a generation of this size or a later one; return its members by rank."""

        def newest() -> list[Entry]:
            assignments = [event for event in self.log("rank") if event.generation >= generation]
            last = max((event.generation for event in assignments), default=0)
            return [event for event in assignments if event.generation == last]

        def formed() -> bool:
            assert self.process.poll() is None, self.err
            return {event.size for event in newest()} == {size} and len(newest()) == size

        wait_for(formed, f"a generation of {size}", timeout_s=300)
        return sorted(newest(), key=lambda event: event.rank)

    def tell(self, name: str, text: str = "") -> None:
        """Give the workers a command."""
        (self.folder / f".{name}").write_text(text)
        (self.folder / f".{name}").rename(self.folder / name)

    def code(self, timeout_s: float = 240) -> int:
        """Wait for the job's end; return its exit code."""
        return self.process.wait(timeout_s)

    def done(self) -> int:
        """Let the workers finish; return the job's exit code."""
        self.tell("stop")
        return self.code()

    @property
    def err(self) -> str:
        """What the driver has printed."""
        return (self.folder / "err").read_text()

    def says(self, text: str, timeout_s: float = 240) -> None:
        """Wait until the driver prints a text."""
        wait_for(lambda: text in self.err, f"'{text}' in {self.err}", timeout_s)


def hosts(folder: Path, text: str) -> str:
    """Write what the discovery script prints; return the option that names it."""
    script, printed = folder / "hosts.sh", folder / "hosts.txt"
    (folder / "hosts.new").write_text(text)
    (folder / "hosts.new").rename(printed)
    if not script.exists():
        script.write_text(f"#!/bin/sh\ncat {printed}\n")
        script.chmod(0o755)
    return f"--host-discovery-script {script}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_replaced_on_a_single_host(tmp_path: Path, rank: int) -> None:
    """The surviving worker continues as rank 0 in its process,
    and a new process takes the slot of the killed one.
    """
    with Job(tmp_path, "-np 2 --min-np 1 -H localhost:2") as job:
        first = job.ranks(2)
        os.kill(first[rank].pid, signal.SIGKILL)
        second = job.ranks(2, generation=2)
        assert second[0].pid == first[1 - rank].pid
        assert second[1].worker == first[rank].worker.replace("#1", "#2")
        assert job.done() == 0
        assert (
            f"rank {rank} (localhost, slot {first[rank].worker[10]}) was killed by SIGKILL; 1 rank"
            " continues" in job.err
        )


def test_a_survivor_has_its_rank_at_once(tmp_path: Path) -> None:
    """The survivor learns of the loss from its heartbeat (0.5 s) and
    gets its rank without a second request (10 s).
    """
    with Job(tmp_path, "-np 2 --min-np 1") as job:
        first = job.ranks(2)
        job.tell("late", "60")
        os.kill(first[1].pid, signal.SIGKILL)
        second = job.ranks(1, generation=2)
        assert second[0].pid == first[0].pid
        # the survivor may write of its rank before the driver writes of it
        job.says("generation 2: ")
        (formed,) = re.findall(
            r"1 rank on localhost, generation 2: .* formed ([\d.]+) s later", job.err
        )
        assert float(formed) < 5
        assert job.done() == 0


def test_both_killed_are_both_replaced(tmp_path: Path) -> None:
    """If both workers are killed, two new processes form the next generation."""
    with Job(tmp_path) as job:
        for event in job.ranks(2):
            os.kill(event.pid, signal.SIGKILL)
        assert {event.worker for event in job.ranks(2, generation=2)} == {
            "localhost/0#2",
            "localhost/1#2",
        }
        assert job.done() == 0


def test_a_worker_that_dies_before_its_rank_is_replaced(tmp_path: Path) -> None:
    """A new worker that is killed while it waits for its rank is replaced."""
    with Job(tmp_path, "-np 2 --min-np 2") as job:
        first = job.ranks(2)
        os.kill(first[0].pid, signal.SIGSTOP)  # does not come to join: the newcomer has to wait
        os.kill(first[1].pid, signal.SIGKILL)
        newcomer = first[1].worker.replace("#1", "#2")
        wait_for(lambda: any(event.worker == newcomer for event in job.log("join")), "the newcomer")
        os.kill(
            next(event.pid for event in job.log("join") if event.worker == newcomer), signal.SIGKILL
        )
        os.kill(first[0].pid, signal.SIGCONT)
        assert job.ranks(2, generation=2)[1].worker == first[1].worker.replace("#1", "#3")
        assert job.done() == 0


def test_a_rank_that_cannot_be_replaced_ends_the_job_after_the_timeout(tmp_path: Path) -> None:
    """With min-np equal to np the job fails after --elastic-timeout,
    and the driver reports what it lacked.
    """
    option = hosts(tmp_path, "localhost:1\n127.0.0.1:1\n")
    with Job(tmp_path, f"-np 2 --min-np 2 --elastic-timeout 2 {option}") as job:
        first = job.ranks(2)
        hosts(tmp_path, "localhost:1\n")
        gone = next(event for event in first if event.worker.startswith("127"))
        job.says("127.0.0.1 is gone")
        os.kill(gone.pid, signal.SIGKILL)
        assert job.code() == 1
        assert (
            "1 worker for 2 s (--elastic-timeout), and 2 are needed (--min-np); hosts: localhost:1"
            in job.err
        )


def test_an_error_in_the_users_code_ends_the_job_with_its_code(tmp_path: Path) -> None:
    """If a worker exits with code 3, the job ends with 3 and no worker is restarted."""
    with Job(tmp_path) as job:
        job.ranks(2)
        job.tell("exit-1", "3")
        assert job.code() == 3
        assert re.search(
            r"the job ends with exit code 3: rank 1 \(localhost, slot \d\) ended with exit code 3",
            job.err,
        )
        assert {event.worker[-2:] for event in job.log()} == {"#1"}


def test_a_preempted_rank_is_not_replaced(tmp_path: Path) -> None:
    """If a worker exits with code 75, the other one continues alone."""
    with Job(tmp_path) as job:
        job.ranks(2)
        job.tell("exit-1", "75")
        job.ranks(1, generation=2)
        assert job.done() == 0
        assert {event.worker[-2:] for event in job.log()} == {"#1"}


def test_a_job_whose_ranks_are_all_preempted_ends_with_75(tmp_path: Path) -> None:
    """If all workers exit with code 75, the job exits with 75."""
    with Job(tmp_path) as job:
        job.ranks(2)
        job.tell("exit-0", "75")
        job.tell("exit-1", "75")
        assert job.code() == 75


def test_a_frozen_rank_is_killed_and_replaced(tmp_path: Path) -> None:
    """A worker that is stopped (SIGSTOP) sends no heartbeats; the driver kills and replaces it."""
    with Job(tmp_path, MEMBER_STALL_S="1.5") as job:
        first = job.ranks(2)
        os.kill(first[1].pid, signal.SIGSTOP)
        assert job.ranks(2, generation=2)[0].pid == first[0].pid
        assert job.done() == 0
        assert "sent no heartbeat for 1.5 s (frozen?) and was killed" in job.err


def test_a_rank_that_hangs_writes_its_stacks_and_is_killed(tmp_path: Path) -> None:
    """A worker that sends heartbeats without progress,
    while the other one waits in a collective, counts as hung.
    """
    with Job(tmp_path, MEMBER_STALL_S="1.5") as job:
        first = job.ranks(2)
        job.tell("hang-1")
        job.tell("wait-0")
        job.says("all ranks write their stacks now")
        wait_for(lambda: len(job.log("dump")) == 2, "the stacks")
        (tmp_path / "hang-1").unlink()
        (tmp_path / "wait-0").unlink()
        job.tell("stop")
        assert job.code() == 0 and {event.pid for event in job.log("dump")} == {
            event.pid for event in first
        }


def test_an_end_that_takes_its_time_is_no_freeze(tmp_path: Path) -> None:
    """A worker whose interpreter takes 4 s to exit is not killed,
    although 1.5 s without heartbeats count as a freeze.
    """
    with Job(tmp_path, MEMBER_STALL_S="1.5") as job:
        job.ranks(2)
        job.tell("slow-end")
        assert job.done() == 0


def test_hosts_come_and_go(tmp_path: Path) -> None:
    """A host that is added gets a worker, a removed host loses its worker,
    and a host that returns gets a new one.
    """
    option = hosts(tmp_path, "localhost:1\n")
    with Job(tmp_path, f"-np 1 --min-np 1 --max-np 4 {option}") as job:
        job.ranks(1)
        hosts(tmp_path, "localhost:1\n127.0.0.1:1\n")
        second = job.ranks(2, generation=2)
        assert second[1].worker == "127.0.0.1/0#1"
        hosts(tmp_path, "localhost:1\n")
        third = job.ranks(1, generation=3)
        assert third[0].worker == "localhost/0#1"
        job.says("has left (ended with exit code 0): slot 0 of 127.0.0.1")
        hosts(tmp_path, "localhost:1\n127.0.0.1:1\n")
        assert job.ranks(2, generation=4)[1].worker == "127.0.0.1/0#2"
        assert job.done() == 0


def test_a_discovery_script_that_fails_for_a_while_changes_nothing(tmp_path: Path) -> None:
    """The failure is reported once and the hosts are kept;
    when the script works again, its output counts again.
    """
    option = hosts(tmp_path, "localhost:1\n")
    with Job(tmp_path, f"-np 1 --min-np 1 {option}") as job:
        job.ranks(1)
        (tmp_path / "hosts.txt").unlink()
        job.says("ended with exit code 1; it must print hosts")
        hosts(tmp_path, "")  # as of a cloud whose interface answers nothing
        time.sleep(2.5)
        hosts(tmp_path, "localhost:2\n")
        job.says("the host discovery script works again")
        job.ranks(2, generation=2)
        assert job.done() == 0
        assert job.err.count("it must print hosts") == 1


def test_a_discovery_script_that_fails_at_first_is_fatal(tmp_path: Path) -> None:
    """A discovery script that fails at the start ends the job with exit code 2."""
    with Job(tmp_path, "-np 1 --min-np 1 --host-discovery-script false") as job:
        assert job.code() == 2
        assert "--host-discovery-script 'false' ended with exit code 1" in job.err


def test_the_reset_limit_ends_the_job(tmp_path: Path) -> None:
    """With --reset-limit 0 the first lost worker ends the job."""
    with Job(tmp_path, "-np 2 --min-np 1 --reset-limit 0") as job:
        os.kill(job.ranks(2)[1].pid, signal.SIGKILL)
        assert job.code() == 1
        assert "--reset-limit" in job.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_driver_reaches_all(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM, or Slurm's SIGUSR1, all workers and the job exit with 75;
    of SIGINT, which these workers do not handle, they die.
    """
    with Job(tmp_path) as job:
        job.ranks(2)
        job.process.send_signal(number)
        handled = number != signal.SIGINT
        assert job.code() == (75 if handled else 130)
        assert len(job.log("preempted")) == (2 if handled else 0)


def test_a_killed_driver_leaves_no_worker_behind(tmp_path: Path) -> None:
    """If the driver is killed, its reaper sends the workers SIGTERM and exits after them."""
    with Job(tmp_path) as job:
        job.ranks(2)
        job.process.kill()
        job.code()
        wait_for(lambda: not list(job.left()), "the end of all processes", timeout_s=30)
        assert len(job.log("preempted")) == 2


def test_a_finished_job_ends_by_itself_and_prints_ranks(tmp_path: Path) -> None:
    """Each line of output carries its rank, and each output file the name of its worker."""
    with Job(tmp_path, "-np 2 --min-np 1 --output-filename printed", steps=20) as job:
        assert job.code() == 0
        assert sorted((tmp_path / "out").read_text().splitlines()) == [
            "[0]<stdout>:rank 0 of 2",
            "[1]<stdout>:rank 1 of 2",
        ]
        assert (tmp_path / "printed/worker.localhost-0-1/stdout").read_text().startswith("[")


def test_what_crashes_at_its_start_ends_the_job(tmp_path: Path) -> None:
    """If no worker gets a rank before it dies, the job ends."""
    (tmp_path / "die-localhost").touch()
    with Job(tmp_path) as job:
        assert job.code() == 1
        assert "no worker got as far as a rank" in job.err


def test_a_slot_that_only_crashes_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    """If every replacement dies at once,
    the pauses between them count towards --elastic-timeout.
    """
    with Job(tmp_path, "-np 2 --min-np 2 --elastic-timeout 2") as job:
        first = job.ranks(2)
        (tmp_path / "die-localhost").touch()
        os.kill(first[1].pid, signal.SIGKILL)
        assert job.code() == 1
        assert (
            "crashed" in job.err.splitlines()[-1]
            and "--elastic-timeout" in job.err.splitlines()[-1]
        )


def test_a_command_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    """A command that does not exist ends the job with 127, as in a shell."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainkit.launch.elastic",
            "-np",
            "1",
            "--min-np",
            "1",
            "no-such-program",
        ],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 127 and "No such file or directory: 'no-such-program'" in done.stderr


def test_requests_without_a_signature_are_refused(tmp_path: Path) -> None:
    """POST, PUT and GET without a signature get 403, and the job continues."""
    with Job(tmp_path) as job:
        event = job.ranks(2)[0]
        env = dict(
            line.split("=", 1)
            for line in Path(f"/proc/{event.pid}/environ").read_text().split("\0")
            if line.startswith("HOROVOD_")
        )
        for method, target in (
            ("POST", "/elastic/join"),
            ("PUT", "/g1.global/0"),
            ("GET", "/g1.global/0"),
        ):
            connection = http.client.HTTPConnection(
                "127.0.0.1", int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]), timeout=5
            )
            connection.request(method, target, b"{}" if method != "GET" else None)
            assert connection.getresponse().status == 403
            connection.close()
        command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in job.left()]
        assert not any(env["HOROVOD_RENDEZVOUS_SECRET"] in line for line in command_lines)
        assert job.done() == 0


SSH = """#!/bin/sh
# Runs the remote command here, in an empty environment and a session of its own, as sshd does.
while [ "$1" = -o ]; do shift 2; done
echo "$*" >> {folder}/ssh-arguments
[ "$1" = lost.invalid ] && exit 255
exec env -i PATH=/usr/bin:/bin {mark} setsid --wait /bin/sh -c "$2"
"""


def remote_job(folder: Path) -> Job:
    """Start a job of two hosts of which one is reached by a fake ssh."""
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    job_mark = f'{_MARK}="${_MARK}"'
    ssh.write_text(SSH.format(folder=folder, mark=job_mark))
    ssh.chmod(0o755)
    option = hosts(folder, "localhost:1\nfar.invalid:1\n")
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MEMBER_STALL_S": "1.5"}
    return Job(folder, f"-np 2 --min-np 1 --network-interface lo {option}", **own)


def test_a_worker_behind_ssh_is_as_good_as_one_here(tmp_path: Path) -> None:
    """A remote worker gets environment and secret through stdin, is replaced if killed,
    and leaves with its host.
    """
    with remote_job(tmp_path) as job:
        first = job.ranks(2)
        far = next(event for event in first if event.worker.startswith("far"))
        environ = Path(f"/proc/{far.pid}/environ").read_text()
        secret = re.search("HOROVOD_RENDEZVOUS_SECRET=(\\w{64})", environ)
        assert secret and secret[1] not in (tmp_path / "ssh-arguments").read_text()
        assert Path(f"/proc/{far.pid}/cwd").readlink() == tmp_path
        os.kill(far.pid, signal.SIGKILL)
        second = job.ranks(2, generation=2)
        job.says("(far.invalid, slot 0) was killed by SIGKILL")
        os.kill(second[1].pid, signal.SIGSTOP)  # SIGKILL has to reach it over there
        job.ranks(2, generation=int(second[1].generation) + 1)
        hosts(tmp_path, "localhost:1\n")
        job.says("slot 0 of far.invalid was removed")
        job.says("has left")
        assert job.done() == 0


def test_signals_and_the_drivers_end_reach_a_worker_behind_ssh(tmp_path: Path) -> None:
    """SIGTERM reaches a remote worker through ssh's stdin."""
    with remote_job(tmp_path) as job:
        job.ranks(2)
        job.process.send_signal(signal.SIGTERM)
        assert job.code() == 75 and len(job.log("preempted")) == 2


def test_a_worker_behind_ssh_ends_when_the_driver_is_killed(tmp_path: Path) -> None:
    """A remote worker exits when its stdin ends."""
    with remote_job(tmp_path) as job:
        job.ranks(2)
        job.process.kill()
        job.code()
        wait_for(lambda: not list(job.left()), "the end of all processes", timeout_s=30)
        assert len(job.log("preempted")) == 2
