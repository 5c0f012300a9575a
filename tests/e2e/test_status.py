"""`status` beside a real job of two ranks:
while it runs, after both were killed, and after its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import BIN, Command
from tests.helpers.pages import part

pytestmark = pytest.mark.parallel

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
FIT = (
    "horovodrun -np 2 python -m trainkit fit conf=mlp run_dir=runs/mine resume=auto"
    " callbacks=goodput"
)
MARK = "TRAINKIT_TEST_STATUS"


def ranks(folder: Path) -> list[int]:
    """Return the processes of the job in a folder that are ranks."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended by now, or none of ours
            variables = (
                (place / "environ").read_bytes().split(b"\0") if place.name.isdigit() else []
            )
            name = (place / "cmdline").read_bytes().split(b"\0")[0] if variables else b""
            if (
                f"{MARK}={folder}".encode() in variables
                and b"python" in name
                and any(v[:13] == b"HOROVOD_RANK=" for v in variables)
            ):
                found.append(int(place.name))
    return found


@contextlib.contextmanager
def running(folder: Path, words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job beside the test; nothing of it is left."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PATH": f"{BIN}:{env['PATH']}", MARK: str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(
            f"{FIT} {words}".split(),
            cwd=folder,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield job
    finally:
        for pid in ranks(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def wait_until(
    command: Command, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 150
) -> dict[str, Any]:
    """Ask for the status until it is as expected, and return it."""
    end, seen = time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        done = command("python -m trainkit status runs/mine --json")
        seen = done.text
        if done.code == 0 and holds(facts := json.loads(done.out)):
            return facts
    raise AssertionError(f"the status did not come about within {timeout_s} s:\n{seen}")


def commands() -> list[str]:
    """Return the page's commands."""
    return [
        line
        for block in re.findall(
            r"```sh\n(.*?)```", part(PAGE, "What a job does now"), flags=re.DOTALL
        )
        for line in block.splitlines()
    ]


def test_a_job_is_seen_running_killed_and_ended(command: Command, tmp_path: Path) -> None:
    """Each time with its state; the page's commands all tell of the ended one."""
    with running(tmp_path, "trainer.max_epochs=1000") as job:
        facts = wait_until(
            command, lambda facts: facts["state"] == "running" and facts["progress"]["step"] > 30
        )
        progress = facts["progress"]
        assert (facts["ranks"], progress["engine"], progress["launcher"]) == (
            2,
            "horovod",
            "horovodrun",
        )
        assert (
            list(progress["hosts"].values()) == [[0, 1]]
            and progress["total_steps"] == 1000 * progress["steps_in_epoch"]
        )
        wait_until(
            command,
            lambda facts: (
                bool(facts["checkpoints"]) and (facts["progress"]["seconds_left"] or 0) > 1
            ),
        )
        both = ranks(tmp_path)
        assert len(both) == 2 and progress["pid"] in both, (both, progress)
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        assert job.wait(60) != 0
    facts = wait_until(command, lambda facts: facts["state"] == "lost")
    assert "resume=auto continues" in facts["why"]
    with running(tmp_path, f"trainer.max_epochs={facts['progress']['epoch'] + 2}") as job:
        assert job.wait(150) == 0, (tmp_path / "output").read_text()
    assert len(commands()) == 4
    for line in commands():
        done = command(line)
        assert done.code == 0, done.text
        if "--json" in line:
            facts = json.loads(done.out)
            assert (facts["state"], facts["restarts"]) == ("ended", 1)
            assert (
                facts["progress"]["step"]
                == facts["progress"]["total_steps"]
                == facts["checkpoints"][-1]["step"]
            )
            assert 0 < facts["goodput"]["goodput"] < 1
        else:
            assert done.out.lstrip("0123456789:").lstrip().startswith("ended"), done.out
