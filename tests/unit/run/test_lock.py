"""One fit at a time in a folder, however the one before has ended."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import toy
from trainkit.engine.single import SingleEngine
from trainkit.errors import ConfigError
from trainkit.run.lock import LOCK, RunLock, holder_of

# A process that takes the folder, says so, and holds it until its input ends; `fork` leaves it a
# child, as loaders do.
HOLDER = """
import os, sys
from pathlib import Path
from trainkit.run.lock import RunLock

with RunLock() as lock:
    lock.take(Path(sys.argv[1]))
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
        os.read(0, 1)
        os._exit(0)
    os.write(1, b"held\\n")
    os.read(0, 1)
"""
# A process that enters many times, and writes down when it comes and goes.
VISITOR = """
import os, sys, time
from trainkit.extensions.elastic.rehearsal import one_at_a_time

journal = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for _ in range(100):
    with one_at_a_time("visit"):
        os.write(journal, b"<")
        time.sleep(0.0005)  # the others come to wait
        os.write(journal, b">")
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a process which holds the folder; all end with the test."""
    started: list[subprocess.Popen[str]] = []

    def holder(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), *flags]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        if not flags:
            assert process.stdout.readline() == "held\n"
        return process

    yield holder
    for process in started:
        process.kill()
        process.communicate()


def take(folder: Path) -> None:
    """Take a folder and let it go."""
    with RunLock() as lock:
        lock.take(folder)


def test_a_second_run_is_refused_and_the_holder_named(start: Start, tmp_path: Path) -> None:
    """While a run is alive the next one is refused;
    host, process, command, time and both ways out are named.
    """
    process = start()
    since = json.loads((tmp_path / LOCK).read_text())["started"]
    with pytest.raises(ConfigError) as caught:
        take(tmp_path)
    said = str(caught.value)
    assert f"process {process.pid} on {socket.gethostname()}" in said
    assert f"{tmp_path}`, since {since})" in said  # the command line ends with the folder
    assert "run_dir=..." in said
    assert "end that process" in said
    # being refused has not loosened the lock
    with pytest.raises(ConfigError, match="another run is going on"):
        take(tmp_path)


def test_an_ended_run_leaves_an_empty_file(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A successful run releases the lock, the file stays and is empty,
    and the next run starts without a message.
    """
    process = start()
    process.communicate("x")
    assert (tmp_path / LOCK).read_bytes() == b""
    take(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_killed_run_is_followed_at_once(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGKILL the next run takes over, and names the former holder in one line."""
    process = start()
    process.kill()
    process.wait()
    take(tmp_path)
    said = capsys.readouterr().out
    assert f"process {process.pid} on {socket.gethostname()}" in said
    assert said.count("\n") == 1


def test_a_worker_that_outlives_its_killed_run_does_not_hold_the_folder(
    start: Start, tmp_path: Path
) -> None:
    """A forked child of the dead run, still alive with the file open,
    does not keep the next run out.
    """
    process = start("fork")
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(2)]
    (child,) = (int(line) for line in lines if line != "held")
    process.kill()
    process.wait()
    os.kill(child, 0)  # it lives, or this would raise
    assert any(
        os.path.samestat((tmp_path / LOCK).stat(), fd.stat())
        for fd in Path(f"/proc/{child}/fd").iterdir()
        if fd.exists()
    )
    try:
        take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "content", [b'{"host": "a", "pi', b"\xff\xfe\x00garbage", b"[1, 2]", b'{"pid": "x"}']
)
def test_a_damaged_description_of_a_dead_run_does_no_harm(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a holder of the lock, the file's text refuses no run; the earlier run is reported."""
    (tmp_path / LOCK).write_bytes(content)
    take(tmp_path)
    assert "unidentified run" in capsys.readouterr().out


def test_a_damaged_description_of_a_live_run_admits_no_other(start: Start, tmp_path: Path) -> None:
    """The lock decides, not the text:
    the next run is refused, and its error says how to find the live one.
    """
    start()
    (tmp_path / LOCK).write_bytes(b"\x00\x01 torn")
    with pytest.raises(ConfigError, match=r"unidentified run.*fuser .*\.lock"):
        take(tmp_path)


def test_one_process_takes_a_folder_once(start: Start, tmp_path: Path) -> None:
    """A second fit of the same process is refused, and the first one's lock stands:
    other processes are still refused.
    """
    with RunLock() as first:
        first.take(tmp_path)
        with pytest.raises(ConfigError, match="a fit of this same process"):
            take(tmp_path)
        other = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"process {os.getpid()} on" in other.stderr
    take(tmp_path)


def test_an_error_lets_the_folder_go(tmp_path: Path) -> None:
    """A run that ends with an error releases the lock as well."""
    with pytest.raises(ZeroDivisionError), RunLock() as lock:
        lock.take(tmp_path)
        1 / 0
    assert (tmp_path / LOCK).read_bytes() == b""


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    """A forked process cannot release its parent's lock: the description and the lock stay."""
    with RunLock() as lock:
        lock.take(tmp_path)
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        # Asked of another process: reading the file in this one would drop the lock.
        other = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"another run is going on: process {os.getpid()} on" in other.stderr


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    """In a read-only folder the error names it and the way out, in place of a traceback."""
    with pytest.raises(
        ConfigError, match=r"run_dir is '/proc/self'.*cannot be written.*run_dir=\.\.\."
    ):
        take(Path("/proc/self"))


def no_locks(*_: Any) -> None:
    """Answer as a filesystem without locks does."""
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_a_live_process_of_this_host_is_believed(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a filesystem without locks a described process excludes
    others while it lives, and no longer.
    """
    process = start()
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.raises(ConfigError, match=f"process {process.pid} on"):
        take(tmp_path)
    process.kill()
    process.wait()
    take(tmp_path)
    assert "takes over" in capsys.readouterr().out


def test_without_locks_another_process_of_that_number_is_not_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process number that was reused since (here: by init) refuses no run."""
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    about = {
        "host": socket.gethostname(),
        "pid": 1,
        "command": "fit",
        "started": "then",
        "birth": "another boot 1",
    }
    (tmp_path / LOCK).write_text(json.dumps(about))
    take(tmp_path)


@pytest.mark.parametrize("content", ['{"host": "elsewhere", "pid": 1}', "torn"])
def test_without_locks_what_cannot_be_looked_up_is_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's process cannot be looked up: it is refused, with the way to override."""
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(
        ConfigError, match=rf"if you know that it does not, delete {tmp_path / LOCK}"
    ):
        take(tmp_path)
    (tmp_path / LOCK).unlink()
    take(tmp_path)


@pytest.mark.parametrize(
    ("slurm", "is_own"),
    [
        (["7", 0], True),
        (["7", 1], True),
        (["7", 2], False),
        (["7", 3], False),
        (["8", 0], False),
        ([None, 0], False),
        ("7", False),
        (7, False),
    ],
)
def test_without_locks_a_job_that_is_queued_again_follows_its_own_start(
    slurm: Any, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts it on another node after the first is lost; no other job replaces a holder."""
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    content = json.dumps({"host": "elsewhere", "pid": 1, "slurm": slurm})
    (tmp_path / LOCK).write_text(content)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    if is_own:
        take(tmp_path)
        return
    with pytest.raises(ConfigError, match="This filesystem has no locks"):
        take(tmp_path)
    assert (tmp_path / LOCK).read_text() == content


@pytest.mark.parametrize("count", ["", "x", "-1", "1.5"])
def test_a_restart_count_that_is_no_number_is_no_restart(
    count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper's, or a site's own: no fit fails by it."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    with RunLock() as lock:
        lock.take(tmp_path)
        assert holder_of(tmp_path)["slurm"] == ["7", 0]


def test_a_job_that_is_queued_again_waits_for_the_lock_of_its_lost_node(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server has it for a while; another job is refused at once."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    process = start()
    monkeypatch.setattr("trainkit.run.lock.time.sleep", lambda _: process.kill())
    with pytest.raises(ConfigError, match=f"process {process.pid} on"):
        take(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take(tmp_path)


def test_processes_enter_one_at_a_time_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the deleting of the file and the waiting for it interleave, one process is inside;
    then no file is left.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "journal").touch()
    command = [sys.executable, "-c", VISITOR, str(tmp_path / "journal")]
    visitors = [subprocess.Popen(command) for _ in range(3)]
    # the suite's own limit ends a hang: three imports of torch take long on busy cores
    assert [visitor.wait() for visitor in visitors] == [0, 0, 0]
    assert (tmp_path / "journal").read_text() == "<>" * 300
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("joins_late", [False, True])
def test_a_rank_that_joins_later_waits_for_the_lock(
    joins_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank 0 that it replaces may hang, and hold the folder until it is killed;
    a new run is refused at once.
    """
    waited: list[float] = []
    monkeypatch.setattr(
        RunLock, "take", lambda lock, run_dir, patience_s: waited.append(patience_s)
    )
    engine = SingleEngine()
    engine.ranks.joins_late = joins_late
    toy.quiet(tmp_path, engine=engine, max_steps=1).fit(toy.Line(), toy.loader())
    assert waited == [60.0 if joins_late else 0.0]


def test_a_full_disk_keeps_no_run_out(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is the operating system's;
    what it says of its holder is for the message of a refused run.
    """

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with RunLock() as lock:
        lock.take(tmp_path)
        other = start("refused")
        assert other.wait(30) != 0
