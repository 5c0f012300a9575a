"""Starts a job on hosts, watches it, and checks its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.storm.hosts import Hosts, sshd_missing
from tests.faults.storm.job import SAMPLES, STEP
from trainkit.extensions.reports.status.status import Status, read_status

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("job.py")

# Horovod's own start of fixed ranks needs more of ssh than the stand-in has, and leaves connections
# of its own to be counted.
needs_ssh = pytest.mark.skipif(
    sshd_missing() != "", reason=f"{sshd_missing()}: apt-get install openssh-server"
)


@dataclass
class Job:
    """A job of two ranks on two hosts; `of` starts one, in a context that leaves no process."""

    hosts: Hosts
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def text(self) -> str:
        """What it has printed since its start."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def step(self) -> tuple[int, int]:
        """Steps taken and the number of ranks, as rank 0 noted them; (-1, 0) before the first."""
        try:
            step, _, ranks = (self.folder / "notes" / "step").read_text().split()
        except (OSError, ValueError):
            return -1, 0
        return int(step), int(ranks)

    def wait_for(self, what: str, holds: Callable[[], bool], timeout_s: float = 240) -> float:
        """Wait until something holds while the job lives; return the seconds."""
        began = time.monotonic()
        while not holds():
            waited = time.monotonic() - began
            assert waited < timeout_s, (
                f"{what} did not happen within {timeout_s:g} s:\n{self.text[-3000:]}"
            )
            time.sleep(0.02)
        return time.monotonic() - began

    def reach(self, step: int) -> None:
        """Wait until the job has taken so many steps."""
        self.wait_for(f"step {step}", lambda: self.step[0] >= step or self.code is not None)
        assert self.code is None, self.text[-3000:]

    def set_pace(self, seconds: float) -> None:
        """Let each step from now on take so long at least."""
        draft = self.folder / "notes" / "pace-draft"
        draft.write_text(str(seconds))
        draft.replace(self.folder / "notes" / "pace")

    @property
    def code(self) -> int | None:
        """The exit code of the first command that ended, or None."""
        return next((code for p in self.processes if (code := p.poll()) is not None), None)

    def end(self, timeout_s: float = 300) -> int:
        """Wait until all its commands have ended;
        return the largest exit code (a signal's number is one).
        """
        try:
            return max(abs(process.wait(timeout_s)) for process in self.processes)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the job did not end within {timeout_s:g} s:\n{self.text[-3000:]}"
            ) from None

    def left(self) -> list[int]:
        """Return its processes on the hosts."""
        there = [
            pid
            for host in range(self.hosts.count)
            if self.hosts.is_there(host)
            for pid in self.hosts.processes(host)
        ]
        return [pid for pid in there if str(JOB).encode() in _command(pid)]

    def status(self) -> Status:
        """Return what `trainkit status` shows."""
        return read_status(self.run_dir)

    def check_samples(self, epochs: int) -> None:
        """Check that both ranks have trained on each sample once in each epoch."""
        ends = [json.loads(path.read_text()) for path in (self.folder / "notes").glob("end-*.json")]
        assert len(ends) == 2, self.text[-3000:]
        for end in ends:
            assert end["step"] == epochs * SAMPLES // STEP and end["uneven"] == 0
            assert max(abs(count - epochs) for count in end["seen"]) < 1e-6
        assert ends[0]["weights"] == ends[1]["weights"]


@contextlib.contextmanager
def job_of(
    hosts: Hosts,
    folder: Path,
    launcher: str,
    words: Sequence[str] = (),
    *,
    program: Sequence[str] = (sys.executable,),
    wait_for_start: bool = True,
    **given: Any,
) -> Iterator[Job]:
    """Start a job on hosts 0 and 1.

    Args:
        hosts: at least two.
        folder: of the job; its `run` is the run's folder.
        launcher: "static", "elastic" (horovodrun), or "torchrun".
        words: more of the launcher's options.
        program: runs the job's script on each host, but under torchrun.
        wait_for_start: whether the job is to take a step first.
        given: for the script: pace_s, epochs.
    """
    (folder / "run").mkdir(exist_ok=True)
    (folder / "notes").mkdir(exist_ok=True)
    for old in [
        path for name in ("end-*", "step", "pace") for path in (folder / "notes").glob(name)
    ]:
        old.unlink()
    settings = json.dumps({"pace_s": 0.01, "epochs": 1, "elastic": launcher == "elastic"} | given)
    script = [str(JOB), str(folder / "run"), str(folder / "notes"), settings]
    environ = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HOROVOD_", "PYTEST_", "TRAINKIT_"))
    }
    environ |= {"PATH": hosts.path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = Job(hosts, folder)
    with (folder / "output").open("wb") as output:
        for command in _commands(hosts, launcher, words, program):
            job.processes.append(
                subprocess.Popen(
                    [*command, *script],
                    env=environ,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
    try:
        if wait_for_start:
            job.reach(1)
        yield job
    finally:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in job.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _commands(
    hosts: Hosts, launcher: str, words: Sequence[str], program: Sequence[str]
) -> list[list[str]]:
    if launcher == "torchrun":
        options = [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={hosts.address(0)}:29500",
        ]
        return [
            [*hosts.on(host), "torchrun", *options, "--rdzv-id=hosts", *words] for host in (0, 1)
        ]
    named = ",".join(f"{hosts.address(host)}:1" for host in (0, 1))
    options = (
        ["--min-np", "1", "--blacklist-cooldown-range", "1", "2"]
        if launcher == "elastic"
        else ["--disable-cache"]
    )
    given = [
        "horovodrun",
        "--gloo",
        "-np",
        "2",
        *options,
        *([] if "-H" in words else ["-H", named]),
        *words,
    ]
    return [[*hosts.launcher, *given, *program]]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
