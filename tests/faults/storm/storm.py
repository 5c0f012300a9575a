"""One job in a storm: the command, its hosts, its disk, and what it reports.
Faults act on it (faults.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.storm.disk import Disk
from tests.faults.storm.hosts import Hosts
from tests.faults.storm.job import RANKS, REPLICAS

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("job.py")
MARK = "TRAINKIT_STORM"
# what starts a job's ranks, by the engine by which they train
LAUNCHERS = {
    "horovod": ["horovodrun", "--gloo"],
    "ddp": [sys.executable, "-m", "trainkit", "launch"],
    "fsdp": [sys.executable, "-m", "trainkit", "launch"],
}
PREEMPTED = 75
MOST_SLOTS = 4
PACE_S = 0.02
# a worker that is cut off learns of its driver's end after 30 s, and has 30 s to end
_GONE_S = 60.0
_PROGRESS_S = 120.0
_STEPS = 3  # steps that show that a fault is survived


class FindingError(AssertionError):
    """The job broke a promise."""


@dataclass(order=True)
class Undo:
    """The end of a fault that lasts."""

    at: float
    text: str = field(compare=False)
    do: Callable[[], None] = field(compare=False)
    host: int | None = field(compare=False, default=None)


class Storm:
    """A job under faults; a context manager that leaves no process.

    Args:
        folder: of all that the storm writes, but for the run's.
        rng: draws the ranks of a start, and the faults.
        disk: the run's.
        hosts: the job's.
        say: prints a line.
        engine: one of LAUNCHERS.
    """

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        disk: Disk,
        hosts: Hosts,
        say: Callable[[str], None],
        engine: str,
    ) -> None:
        self.folder, self.rng, self.disk, self.hosts, self.say = folder, rng, disk, hosts, say
        self.engine = engine
        self.run_dir = disk.folder / "run"
        self.notes = folder / "notes"
        self.temporary = folder / "tmp"
        self.slots = dict.fromkeys(
            range(RANKS[engine]), 1
        )  # what the discovery script prints, by host
        self.undos: list[Undo] = []
        self.may_end = ""  # why the job may end now, or an empty text
        self.ends: list[tuple[str, int]] = []  # (why, exit code) of each end of the command
        self.damaged: set[str] = set()  # checkpoints
        # whether a rank has got SIGTERM or SIGINT since the last start: the last one ends the job
        self.has_terminated = False
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[str] | None = None
        self._said_before = 0  # length of the output at the last start

    def __enter__(self) -> Storm:
        self.notes.mkdir()
        self.temporary.mkdir()
        script = self.folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\nexec cat {self.folder}/hosts.txt\n")
        script.chmod(0o755)
        self.list_hosts()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        with contextlib.suppress(OSError):
            shutil.copytree(self.run_dir / "logs", self.folder / "logs")

    # ---- the command

    @property
    def least(self) -> int:
        """The fewest slots with which a job trains."""
        return REPLICAS if self.engine == "fsdp" else 1

    def start(self) -> None:
        """Start the command, as a user or a scheduler does after its end."""
        for path in self.notes.glob("end-*.json"):
            path.unlink()
        # a run begins with the ranks that its batch is meant for, and resumes with any number
        least = self.least  # a multiple of it starts
        ranks = RANKS[self.engine]
        if self.checkpoints():
            ranks = (
                self.rng.randint(1, max(1, min(ranks, sum(self.slots.values())) // least)) * least
            )
        options = (
            f"-np {ranks} --min-np {ranks // REPLICAS if least > 1 else 1} --max-np {MOST_SLOTS}"
            f" --host-discovery-script {self.folder}/hosts.sh --blacklist-cooldown-range 1 2"
        )
        given = {"pace_s": PACE_S, "epochs": None, "elastic": True, "engine": self.engine}
        job = [sys.executable, str(JOB), str(self.run_dir), str(self.notes), json.dumps(given)]
        self._said_before = len(self.text)
        self.may_end, self.has_terminated = "", False
        with (self.folder / "output").open("a") as output:
            self._process = subprocess.Popen(
                [*self.hosts.launcher, *LAUNCHERS[self.engine], *options.split(), *job],
                env=self._environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        environ = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HOROVOD_", "PYTEST_", "TRAINKIT_"))
        }
        return environ | {
            "PATH": self.hosts.path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: self._mark,
        }

    def signal(self, number: signal.Signals, may_end: str = "") -> None:
        """Send the driver a signal; `may_end` says why it may end then."""
        assert self._process is not None
        self.may_end = may_end or self.may_end
        self._process.send_signal(number)

    @property
    def code(self) -> int | None:
        """The command's exit code, or None."""
        assert self._process is not None
        return self._process.poll()

    @property
    def text(self) -> str:
        """What the command has printed, over all its starts."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def text_since_start(self) -> str:
        """What it has printed since its last start."""
        return self.text[self._said_before :]

    def await_end(self, limit_s: float = _GONE_S) -> int:
        """Wait until the command and all its processes have ended; return its code."""
        end = time.monotonic() + limit_s
        while self.code is None or self.processes():
            self.attend_undos()
            if time.monotonic() > end:
                raise FindingError(
                    f"the command ({self.code}) or its processes did not end: {self.processes()}"
                )
            time.sleep(0.05)
        assert self.code is not None
        return self.code

    def restart(self) -> None:
        """Start the command again once all of it has ended."""
        code = self.await_end()
        if code == PREEMPTED and self.has_terminated:
            self.may_end = self.may_end or "the only rank was terminated"
        self.ends.append((self.may_end or "by itself", code))
        if not self.may_end:
            raise FindingError(f"the command ended with {code}, and no fault ends it")
        self.say(f"    the command ended with {code} ({self.may_end}), and is started again")
        self.start()

    # ---- its processes

    def processes(self) -> list[int]:
        """Return all processes of the job, on all hosts,
        but for those that have ended and are not collected yet.
        """
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)
        ]

    @property
    def has_formed(self) -> bool:
        """Whether ranks have formed since the last start,
        which needs as many slots as the command asked for.
        """
        return "generation 1" in self.text_since_start

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(
                f"/proc/{pid}/environ"
            ).read_bytes().split(b"\0")
        except OSError:
            return False

    def workers(self, host: int) -> list[int]:
        """Return a host's ranks."""
        return [pid for pid, parent in self._jobs(host) if not _is_job(parent)]

    def loaders(self, host: int) -> list[int]:
        """Return the loader workers of a host's ranks."""
        return [pid for pid, parent in self._jobs(host) if _is_job(parent)]

    def _jobs(self, host: int) -> Iterator[tuple[int, int]]:
        for pid in self.hosts.processes(host) if self.hosts.is_there(host) else []:
            if _is_job(pid):
                with contextlib.suppress(OSError):
                    yield (
                        pid,
                        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]),
                    )

    # ---- its hosts and its disk

    def list_hosts(self) -> None:
        """Write what the discovery script prints."""
        draft = self.folder / ".hosts"
        draft.write_text(
            "".join(
                f"{self.hosts.address(host)}:{count}\n"
                for host, count in self.slots.items()
                if count
            )
        )
        draft.replace(self.folder / "hosts.txt")

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints, the newest last."""
        found = [
            path for path in (self.run_dir / "checkpoints").glob("epoch=*") if not path.is_symlink()
        ]
        return sorted(found, key=lambda path: int(path.name.rpartition("step=")[2].split("-")[0]))

    @property
    def step(self) -> tuple[int, int]:
        """The step that is trained, and its epoch; (-1, -1) before the first."""
        try:
            step, epoch, _ = map(int, (self.notes / "step").read_text().split())
        except FileNotFoundError:
            return -1, -1
        return step, epoch

    # ---- time

    def later(
        self, seconds: float, text: str, do: Callable[[], None], host: int | None = None
    ) -> None:
        """End a fault after a time."""
        self.undos.append(Undo(time.monotonic() + seconds, text, do, host))

    def attend_undos(self, now: bool = False) -> None:
        """End the faults whose time has come, or all of them."""
        for undo in sorted(self.undos):
            if now or undo.at <= time.monotonic():
                self.undos.remove(undo)
                undo.do()
                self.say(f"    {undo.text}")

    @property
    def busy(self) -> set[int | None]:
        """The hosts at which a fault lasts."""
        return {undo.host for undo in self.undos}

    def await_checkpoint(self) -> None:
        """Wait for the run's first checkpoint:
        if all ranks are lost before, a new run begins, with a ledger of its own.
        """
        end = time.monotonic() + _PROGRESS_S
        while not self.checkpoints():
            if self.code is not None or time.monotonic() > end:
                raise FindingError(
                    f"there is no checkpoint, at {self.step}, and the command's code is {self.code}"
                )
            time.sleep(0.02)

    def await_progress(self) -> float:
        """Wait until no fault lasts and some steps are trained; return the seconds.

        Raises:
            FindingError: the job ended and no fault ends it, or it stands still.
        """
        begin, seen = time.monotonic(), {self.step}
        while self.undos or len(seen) <= _STEPS:
            self.attend_undos()
            if self.code is not None:
                self.restart()
            if self.undos:
                seen = {self.step}
            seen.add(self.step)
            if time.monotonic() - begin > _PROGRESS_S:
                raise FindingError(f"no progress for {_PROGRESS_S:g} s, at {self.step}")
            time.sleep(0.02)
        return time.monotonic() - begin

    def finish(self) -> None:
        """End all faults, and let the job end with a whole epoch."""
        self.attend_undos(now=True)
        self.slots = dict.fromkeys(range(RANKS[self.engine]), 1)
        self.list_hosts()
        self.await_progress()
        (self.notes / "last_epoch").write_text(str(self.step[1] + 4))
        while self.await_end(_PROGRESS_S) != 0:
            self.restart()


def _is_job(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) > 1 and words[1] == os.fsencode(JOB)


def make_folder(path: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
