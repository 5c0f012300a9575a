"""Workers as processes: exit codes, groups, lines with ranks, and the data sent to another host."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.journals import wait_until
from trainkit.extensions.elastic.output import WorkerOutput
from trainkit.extensions.elastic.processes import (
    Process,
    Reaper,
    RemoteProcess,
    code_of,
    start_timer,
)
from trainkit.extensions.elastic.remote import SCRIPT, first_lines, ssh_command


class Ended:
    """Records an exit code, from any thread."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._event = threading.Event()

    def __call__(self, code: int | None) -> None:
        self.code = code
        self._event.set()

    def wait(self) -> int | None:
        """Wait for the code and return it."""
        assert self._event.wait(10)
        return self.code


def run(
    command: str, output: WorkerOutput | None = None, number: signal.Signals | None = None
) -> int | None:
    """Run a shell command as a worker; return its code."""
    return finished(Process(["sh", "-c", command], {"PATH": os.environ["PATH"]}), output, number)


def finished(
    process: Process, output: WorkerOutput | None = None, number: signal.Signals | None = None
) -> int | None:
    """Follow a worker to its end, with a signal on the way; return its code."""
    reaper, ended, output = Reaper(), Ended(), output or WorkerOutput(None, False)
    process.follow("a/0#1", output, reaper, ended)
    if number is not None:
        process.send(number)
    code = ended.wait()
    output.drain(5)
    process.send(signal.SIGKILL)  # it has ended: no other process may be hit
    reaper.close()
    return code


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -9 $$", -9),
        ("exit 137", -9),
        ("exit 255", 255),
        ("exit 75", 75),
    ],
)
def test_exit_codes_and_signals(command: str, code: int) -> None:
    """A shell's 128 + 9 is a signal too."""
    assert run(command) == code


def test_codes_above_128_that_are_no_signals_are_the_users() -> None:
    """There is no signal 72."""
    assert (code_of(200), code_of(128), code_of(130), code_of(-9)) == (200, 128, -2, -9)


def test_a_signal_ends_the_whole_group(tmp_path: Path) -> None:
    """A worker's children end with it, also if it ends by itself."""
    assert run(f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60", number=signal.SIGKILL) == -9
    assert run(f"sleep 60 >/dev/null 2>&1 & echo $! > {tmp_path}/pid") == 0
    pid = (tmp_path / "pid").read_text().strip()
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_line_of_sshs_has_one_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with CR LF, which is one end of a line; the file gets the line feed alone."""
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    run(r"printf 'ssh: Could not resolve hostname\r\nlost\r\n' >&2", WorkerOutput(tmp_path, False))
    expected = "[a/0#1]<stderr>:ssh: Could not resolve hostname\n[a/0#1]<stderr>:lost\n"
    assert err.getvalue() == expected
    assert next(tmp_path.glob("worker.*/stderr")).read_bytes() == expected.encode()


def test_lines_carry_the_rank_of_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's name until it has a rank;
    progress bars and a last line without an end are lines too.
    """
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    output = WorkerOutput(tmp_path, False)
    run(r"printf 'one\n10%%\r20%%\rtwo \303\251'; printf 'bad\n' >&2", output)
    assert (
        out.getvalue()
        == "[a/0#1]<stdout>:one\n[a/0#1]<stdout>:10%\r[a/0#1]<stdout>:20%\r[a/0#1]<stdout>:two é\n"
    )
    assert err.getvalue() == "[a/0#1]<stderr>:bad\n"
    assert (tmp_path / "worker.a-0-1" / "stderr").read_text() == "[a/0#1]<stderr>:bad\n"
    output.label("a/0#1", "3")
    run("echo later", output)
    assert out.getvalue().endswith("[3]<stdout>:later\n")


def test_a_screen_that_is_gone_stops_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """horovodrun | head: lines are lost, the worker continues."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    assert run("for i in 1 2 3; do echo line; done; exit 4") == 4


def test_an_ssh_command_shows_nothing() -> None:
    """Options as horovodrun has them; environment and command are not there."""
    command = ssh_command("node2", 2222, "key", "go-1", "accept-new")
    assert command[:-1] == [
        *(
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=accept-new",
            "-o",
            "ConnectTimeout=10",
        ),
        *(
            "-o",
            "ServerAliveInterval=15",
            "-o",
            "ServerAliveCountMax=4",
            "-p",
            "2222",
            "-i",
            "key",
            "node2",
        ),
    ]
    assert command[-1] == f"exec sh -c {shlex.quote(SCRIPT)} trainkit go-1"


def test_a_file_that_cannot_be_opened_costs_no_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its pipe is read all the same:
    a worker whose output is not taken would end by SIGPIPE, or wait forever.
    """
    (tmp_path / "logs").write_text("a file in place of the folder")
    assert (
        run(
            "head -c 300000 /dev/zero | tr '\\0' x && echo && echo done",
            WorkerOutput(tmp_path / "logs", False),
        )
        == 0
    )
    shown = capfd.readouterr()
    assert "[a/0#1]<stdout>:done" in shown.out
    assert shown.err.count("could not be opened, and stays without the output of a/0#1: ") == 2


@pytest.mark.parametrize(("chosen", "expected"), [(None, "accept-new"), ("yes", "yes")])
def test_host_keys_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    """ssh refuses a host whose key has changed, unless TRAINKIT_SSH_HOST_KEYS says otherwise."""
    stand_in = tmp_path / "ssh"
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if chosen is not None:
        monkeypatch.setenv("TRAINKIT_SSH_HOST_KEYS", chosen)
    assert finished(RemoteProcess("node2", None, None, ["true"], {})) == 0
    assert f"-o StrictHostKeyChecking={expected} " in (tmp_path / "arguments").read_text()


@pytest.mark.parametrize(("name", "expected"), [("USR1", None), ("TERM", None), ("KILL", -9)])
def test_a_signal_to_ssh_says_nothing_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: int | None
) -> None:
    """Slurm's reaches all processes of a step: the worker is lost to the driver, and saves. Ours is
    SIGKILL, where a host does not answer.
    """
    stand_in = tmp_path / "ssh"
    stand_in.write_text(f"#!/bin/sh\nkill -{name} $$\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert finished(RemoteProcess("node2", None, None, ["true"], {})) == expected


def test_what_belongs_to_this_host_is_not_sent() -> None:
    """Nor names that no shell can export, or that a shell refuses to set."""
    environ = {
        "A": "x y",
        "CUDA_VISIBLE_DEVICES": "0",
        "SSH_AUTH_SOCK": "s",
        "BASH_FUNC_f%%": "()",
        "a.b": "1",
        "UID": "0",
        "_": "x",
    }
    assert (
        first_lines(environ, "/my dir", ["python", "it's"], "go-1")
        == "export A='x y'\ncd '/my dir' 2>/dev/null\nset -- python 'it'\"'\"'s'\ngo-1\n"
    )


SHELLS = [shell for shell in ("/bin/dash", "/bin/bash") if Path(shell).exists()]


def remote(shell: str, text: str, wait_s: float = 10) -> tuple[int, str]:
    """Run the script as sshd would, with this on its stdin."""
    command = ["setsid", "--wait", shell, "-c", SCRIPT, "trainkit", "go-1"]
    done = subprocess.run(
        command,
        input=text,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_remote_script_runs_the_command_with_its_environment(
    shell: str, tmp_path: Path
) -> None:
    """Values with quotes and newlines arrive intact; its stdin is empty.
    Its SIGTERM at the end of our stdin comes too late.
    """
    command = [
        "sh",
        "-c",
        'cat; printf "%s|%s|%s" "$A" "$PWD" "$1"; trap "" TERM; exit 7',
        "x",
        "two words",
    ]
    code, out = remote(
        shell, first_lines({"A": "it's\na\\b $HOME"}, str(tmp_path), command, "go-1") + "0\n"
    )
    assert out in (f"it's\na\\b $HOME|{tmp_path}|two words", "") and code in (7, 143)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("sent", "code"), [("KILL\n", 137), ("TERM\n", 143), ("INT\n", 143), ("", 143)]
)
def test_the_remote_script_hands_on_signals_and_ends_with_its_stdin(
    shell: str, sent: str, code: int
) -> None:
    """The worker's group gets them, SIGTERM for SIGINT, which it would ignore;
    the code is a shell's.
    """
    worker = "import time; print('ready', flush=True); time.sleep(60)"
    lines = first_lines({}, "/", [sys.executable, "-c", worker], "go-1")
    process = subprocess.Popen(
        ["setsid", "--wait", shell, "-c", SCRIPT, "trainkit", "go-1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(lines)
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    with process.stdin as stdin, process.stdout:
        stdin.write(sent)
        stdin.flush() if sent else stdin.close()
        assert process.wait(10) == code


@pytest.mark.parametrize("shell", SHELLS)
def test_the_remote_script_starts_nothing_without_the_whole_text(
    shell: str, tmp_path: Path
) -> None:
    """A driver that died while it wrote."""
    text = first_lines({}, str(tmp_path), ["touch", "started"], "go-1").removesuffix("go-1\n")
    assert remote(shell, text) == (255, "")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_all_processes_of_a_step_leaves_the_reaper() -> None:
    """Slurm's `--signal=USR1@60` may reach it too: it still ends the workers of a killed driver."""
    reaper = Reaper()
    status = Path(f"/proc/{reaper._process.pid}/status")
    usr1 = 1 << (signal.SIGUSR1 - 1)  # under nohup it would ignore SIGHUP from the first
    ignored = re.compile(r"SigIgn:\s*(\w+)")
    wait_until(
        lambda: bool(int(ignored.findall(status.read_text())[0], 16) & usr1),
        10,
        status.read_text,
    )
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        reaper.tell("+", worker.pid)
        reaper._process.send_signal(signal.SIGUSR1)
        assert reaper._process.stdin is not None
        reaper._process.stdin.close()  # as after the driver's death
        assert worker.wait(10) == -signal.SIGTERM
        assert reaper._process.wait(10) == 0
    finally:
        worker.kill()
        worker.wait()


def test_a_timer_works_after_its_time() -> None:
    """And its thread ends with it."""
    began, worked = time.monotonic(), list[float]()
    start_timer("t", 0.05, lambda: worked.append(time.monotonic()), lambda error: None).join(5)
    assert worked[0] - began >= 0.05
