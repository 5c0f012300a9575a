"""Commands of tests: one that hangs is ended, and the failure says what it was doing."""

from __future__ import annotations

import functools
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.forks import SHARED, USED, server
from tests.helpers.launching import BIN, run_command

PY_SPY = pytest.mark.skipif(
    not shutil.which("py-spy", path=str(BIN)), reason="py-spy is not installed"
)


@PY_SPY
@pytest.mark.parametrize("start", ["python wait.py", "python -m trainkit fit conf=wait"])
def test_a_command_that_hangs_shows_its_stack(start: str, tmp_path: Path) -> None:
    """Started by a shell, and as a fork of a process that has imported torch."""
    wait = "import time\n\n\ndef hang_here(*_, **__):\n    time.sleep(600)\n\n\n"
    (tmp_path / "wait.py").write_text(f"{wait}if __name__ == '__main__':\n    hang_here()\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "wait.yaml").write_text(
        "defaults: [_base, _self_]\ntask: {_target_: wait.hang_here}\ntrainer: {max_epochs: 1}\n"
    )
    with pytest.raises(
        pytest.fail.Exception, match=r"did not end within 8 s:[\s\S]*hang_here \(wait\.py:5\)"
    ):
        run_command(start, tmp_path, timeout_s=8)


def test_a_fork_that_ends_at_once_with_its_program_leaves_the_server(tmp_path: Path) -> None:
    """The server learns of both ends in one look, of the fork's first. It is one of this test's own:
    it stops for a moment.
    """
    (tmp_path / "wait.py").write_text(
        "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(60 * (len(sys.argv) == 1))\n"
    )
    pid, folder = server()
    with subprocess.Popen(
        [folder / "python", "wait.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        fork = int(program.stdout.readline())
        with os.fdopen(os.pidfd_open(fork)) as end:
            os.kill(pid, signal.SIGSTOP)
            try:
                os.kill(fork, signal.SIGKILL)
                assert select.select([end], [], [], 20)[0]
                program.kill()
                program.wait(20)
            finally:
                os.kill(pid, signal.SIGCONT)
    assert run_command("python wait.py --help", tmp_path, timeout_s=8).code == 0


def test_processes_share_a_server_and_their_commands_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork is no child of what it stands for: the server notes the seconds that it used."""
    pid, folder = server()
    monkeypatch.setenv(SHARED, f"{pid}:{folder}")
    assert server() == (pid, folder)
    (tmp_path / "busy.py").write_text(
        "import os, time\nwhile time.process_time() < 0.3: pass\nprint(os.getppid())\n"
    )
    used = tmp_path / "used"
    ended = [run_command("python busy.py", tmp_path, **{USED: str(used)}) for _ in range(2)]
    assert [int(done.out) for done in ended] == [pid, pid]
    assert all(0.3 <= float(line) < 3 for line in used.read_text().split("\n")[:2])


def test_a_server_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its parent has asked for its exit code."""
    gone = subprocess.Popen(["true"])
    monkeypatch.setenv(SHARED, f"{gone.pid}:{tmp_path}")
    with pytest.raises(ProcessLookupError, match="has ended"):
        server()
    gone.wait(20)


def test_a_process_starts_one_server_though_its_environment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fixtures do that begin before the server: each of its starts imports torch."""
    starts = []

    class Started:
        def __init__(self) -> None:
            starts.append(self)
            self.named = f"{os.getpid()}:{tmp_path}"

    (tmp_path / forks.READY).touch()
    monkeypatch.setattr(forks, "Forks", Started)
    monkeypatch.setattr(forks, "own", functools.cache(forks.own.__wrapped__))
    for _ in range(2):
        monkeypatch.delenv(SHARED, raising=False)
        assert server() == (os.getpid(), tmp_path)
    assert len(starts) == 1
