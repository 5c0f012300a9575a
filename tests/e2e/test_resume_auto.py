"""`fit resume=auto`: one command line starts a run, resumes it after a signal,
and does nothing once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import Command, path
from tests.helpers.resuming import assert_same_run, newest
from trainkit.checkpoint.format import WEIGHTS, verify

# In its 21st step it says so, and waits to be let, or asked to end.
WAITS = """
import os
import time
from pathlib import Path

from trainkit.api.callback import Callback


class Waits(Callback):
    def on_train_step_start(self, trainer, task):
        if trainer.global_step == 20:
            Path("process").write_text(str(os.getpid()))
            Path("waiting").touch()
            while not Path("let").exists() and trainer.stopping.signals.received is None:
                time.sleep(0.01)
"""
FIT = (
    "python -m trainkit fit conf=mlp resume=auto +callbacks.waits._target_=waits.Waits"
    " trainer.max_epochs=2 run_dir="
)
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a fit and returns when it waits in its 21st step;
    what it started ends with the test.
    """
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "waits.py").write_text(WAITS)

    def start(line: str) -> subprocess.Popen[str]:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HOROVOD_", "PYTEST_"))
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            line.split(),
            cwd=tmp_path,
            env=env | {"PATH": path()},
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        end = time.monotonic() + 120
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "the fit did not come to its 21st step"
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_one_command_begins_is_ended_resumes_and_is_done(
    waiting: Start, command: Command, tmp_path: Path
) -> None:
    """After SIGTERM (75) the same command resumes to the end of an undisturbed run;
    run again, it does nothing.
    """
    process = waiting(FIT + "here")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    named = re.search(
        r"SIGTERM on rank 0: the run ended after step 21; to resume: ckpt_path=last run_dir=(\S+)",
        out,
    )
    assert named, out
    assert Path(named[1]) == tmp_path / "here"
    assert "Traceback" not in err
    assert verify(newest(tmp_path / "here"))["global_step"] == 21
    (tmp_path / "let").touch()
    done = command(FIT + "here")
    assert done.code == 0, done.text
    assert command(FIT + "whole").code == 0
    assert_same_run(tmp_path / "here", tmp_path / "whole")
    rows = (tmp_path / "here" / "metrics.csv").read_text()
    again = command(FIT + "here")
    assert again.code == 0, again.text
    assert (tmp_path / "here" / "metrics.csv").read_text() == rows


def test_a_folder_in_use_is_refused(waiting: Start, command: Command, tmp_path: Path) -> None:
    """A second fit in the folder of a running one ends with 2, names host and process,
    and changes no file.
    """
    process = waiting(FIT + "here")
    there = sorted(path.name for path in (tmp_path / "here").iterdir())
    second = command(FIT + "here")
    assert second.code == 2, second.text
    assert "where another run is going on" in second.err
    running = (tmp_path / "process").read_text()
    assert f"process {running} on {socket.gethostname()}" in second.err
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == there
    (tmp_path / "let").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(
    command: Command, tmp_path: Path
) -> None:
    """If the newest checkpoint is damaged, the run names it and resumes from the one before."""
    line = (
        "python -m trainkit fit conf=mlp resume=auto run_dir=here"
        " callbacks.checkpoint.save_top_k=-1 trainer.max_epochs="
    )
    assert command(f"{line}2").code == 0
    damaged = newest(tmp_path / "here") / WEIGHTS
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    done = command(f"{line}3")
    assert done.code == 0, done.text
    assert (
        f"{damaged.parent} is damaged: {WEIGHTS} is not what was written. The one before it is"
        " taken." in done.out
    )
    assert "epoch 2/3" in done.out
    assert verify(newest(tmp_path / "here"))["epoch"] == 2


def test_a_folder_that_is_new_each_time_is_refused(command: Command, tmp_path: Path) -> None:
    """resume=auto without a run_dir, which would never find a checkpoint,
    is refused before any file is written.
    """
    done = command("python -m trainkit fit conf=mlp resume=auto")
    assert done.code == 2
    assert "Give the run's folder: run_dir=runs/mlp/mine" in done.err
    assert list(tmp_path.iterdir()) == []
