"""One claim of one trainer: its runs, each forked from a process that has only imported the
trainer, under a time limit.

Under a launcher every rank has a Cell of its own; they call `fit` in the same order, and each gets
the records of all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conformance.broken import BREAKS
from benchmarks.conformance.trainers import by_hand
from benchmarks.conformance.work import KILLED, Fit, Record

LIMIT_S = 90.0
START_LIMIT_S = 240.0
LAUNCH_LIMIT_S = 60.0
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC")
TIMED_OUT = -1000
_PR_SET_PDEATHSIG = 1  # Linux: prctl(2)


class FailsError(Exception):
    """The claim fails; the text has the numbers."""


class RefusedError(Exception):
    """The trainer ends with an error; the text is its last line."""


class NotSupportedError(Exception):
    """The trainer has no such feature, as its documentation says."""


@dataclass
class Outcome:
    """A run that ended.

    Attributes:
        folder: of its files.
        codes: of its ranks; negative for a signal.
        records: what each rank recorded; {} if it was killed before.
        text: what the ranks printed.
        seconds: how long it took.
    """

    folder: Path
    codes: list[int]
    records: list[dict[str, Any]]
    text: str
    seconds: float

    @property
    def first(self) -> dict[str, Any]:
        """The record of rank 0."""
        return self.records[0]

    @property
    def last_line(self) -> str:
        """The line that names the error."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        titled = (line for line in lines if not line.endswith(":"))
        named = [line for line in titled if "Error" in line.split(":")[0] or "Preempted" in line]
        return (named or lines or ["(nothing was printed)"])[-1][:300]


def clean_environment() -> dict[str, str]:
    """Return the environment without what launchers set."""
    hidden = (*_OF_LAUNCHERS, "HOROVOD_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


class Cell:
    """What a claim's program works with.

    Attributes:
        trainer: its name.
        module: its programs.
        size: ranks of the launcher that started this process; 1 without one.
    """

    def __init__(self, trainer: str, module: ModuleType, folder: Path, broken: str = "") -> None:
        self.trainer, self.module, self.folder = trainer, module, folder
        self._broken = broken
        self.rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))
        self.size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        self._known: dict[Any, Outcome] = {}
        self._runs = 0

    def fit(
        self,
        fit: Fit,
        after: Outcome | None = None,
        ranks: int | None = None,
        call: str = "fit",
        limit_s: float = LIMIT_S,
    ) -> Outcome:
        """Run a Fit on all ranks; one that ran before is not repeated.

        Args:
            fit: the run.
            after: its folder is copied, for a run that resumes.
            ranks: 1 for rank 0 alone, without the launcher's variables.
            call: the program of the trainer's module.
            limit_s: after it the run is killed.

        Raises:
            NotSupportedError: the trainer has no such program.
            RefusedError: the run ended with an error that its Fit did not ask for.
        """
        key = (fit, None if after is None else str(after.folder), ranks, call)
        if key not in self._known:
            self._known[key] = self._run(fit, after, ranks or self.size, call, limit_s)
        outcome = self._known[key]
        if any(code == 1 for code in outcome.codes) and fit.raise_on is None:
            raise RefusedError(outcome.last_line)
        return outcome

    def copy(self, outcome: Outcome) -> Outcome:
        """Return a run with a copy of its folder, whose files a claim may damage."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        shutil.copytree(outcome.folder, folder, symlinks=True)
        return replace(outcome, folder=folder)

    def attempt(self, fit: Fit, after: Outcome | None = None, **more: Any) -> Outcome:
        """Run a Fit that may end with an error."""
        with contextlib.suppress(RefusedError):
            return self.fit(fit, after, **more)
        key = (
            fit,
            None if after is None else str(after.folder),
            more.get("ranks"),
            more.get("call", "fit"),
        )
        return self._known[key]

    def _run(
        self, fit: Fit, after: Outcome | None, ranks: int, call: str, limit_s: float
    ) -> Outcome:
        if call != "plain" and not hasattr(self.module, call):
            raise NotSupportedError(f"no program `{call}`")
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        if self.rank == 0:
            if after is not None:
                shutil.copytree(after.folder, folder, symlinks=True)
                for old in (*folder.glob("record-*"), *folder.glob("ended-*"), folder / "port"):
                    old.unlink(missing_ok=True)
            folder.mkdir(exist_ok=True)
            _publish(folder / "port", str(_free_port()))
        _wait_for(folder / "port", limit_s)
        started = time.monotonic()
        if after is not None and self.size == 1:
            with _at(folder, after.folder):
                code = _end_of(self._fork(fit, after.folder, ranks, call), limit_s)
            return outcome_of(folder, [code], time.monotonic() - started)
        if self.rank < ranks:
            pid = self._fork(fit, folder, ranks, call)
            _publish(folder / f"ended-{self.rank}", str(_end_of(pid, limit_s)))
        codes = []
        for rank in range(ranks):
            _wait_for(folder / f"ended-{rank}", limit_s + 10)
            codes.append(int((folder / f"ended-{rank}").read_text()))
        return outcome_of(folder, codes, time.monotonic() - started)

    def _fork(self, fit: Fit, folder: Path, ranks: int, call: str) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        end_with_parent()
        if ranks < self.size:
            keep = clean_environment()
            os.environ.clear()
            os.environ.update(keep)
        elif "HOROVOD_RANK" not in os.environ and self.size > 1:
            os.environ["MASTER_PORT"] = (folder / "port").read_text()
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        run_here(self.module, fit, folder, self.rank, call, self._broken)
        return 0

    def launch(self, fit: Fit, launcher: str = "", limit_s: float = LAUNCH_LIMIT_S) -> Outcome:
        """Run a Fit on two ranks of a real launcher, which sees what becomes of them.

        The time limit begins when both have imported the trainer.
        """
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        (folder / "fit.json").write_text(json.dumps(asdict(fit)))
        command = launch_command(launcher or default_launcher(self.trainer), 2)
        command += ["-m", "benchmarks.conformance.worker", "one", self.trainer, str(folder)]
        started = time.monotonic()
        with (folder / "out-0.txt").open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=clean_environment(), start_new_session=True
            )
            code = _code_of(process, [folder / f"started-{rank}" for rank in (0, 1)], limit_s)
            _end_group(process.pid)
            end_marked(str(folder))
            process.wait()
        return outcome_of(folder, [code], time.monotonic() - started, ranks=2)


@contextlib.contextmanager
def _at(folder: Path, place: Path) -> Iterator[None]:
    """Let a folder be at another one's place, as that of a run is when a user resumes it: some
    checkpoints hold their own path.
    """
    aside = place.with_name(f"{place.name}.aside")
    place.rename(aside)
    folder.rename(place)
    try:
        yield
    finally:
        place.rename(folder)
        aside.rename(place)


def _code_of(process: subprocess.Popen[bytes], marks: list[Path], limit_s: float) -> int:
    """Return the exit code of a launcher, or TIMED_OUT."""
    begun = time.monotonic()
    end = begun + START_LIMIT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            return process.returncode
        if end == begun + START_LIMIT_S and all(mark.exists() for mark in marks):
            end = time.monotonic() + limit_s
        time.sleep(0.05)
    return TIMED_OUT


def outcome_of(folder: Path, codes: list[int], seconds: float, ranks: int = 0) -> Outcome:
    """Return what a run left in its folder."""
    records, texts = [], []
    for rank in range(ranks or len(codes)):
        path = folder / f"record-{rank}.pt"
        records.append(torch.load(path) if path.exists() else {})
        printed = folder / f"out-{rank}.txt"
        texts.append(printed.read_text(errors="replace") if printed.exists() else "")
    return Outcome(folder, codes, records, "\n".join(texts), seconds)


def run_here(module: ModuleType, fit: Fit, folder: Path, rank: int, call: str, broken: str) -> None:
    """Run a Fit in this process, and end it."""
    out = os.open(folder / f"out-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    record = Record(fit, folder, rank)
    code = 1
    try:
        code = _run_program(module, fit, record, call, broken)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # never back into the worker, of which this process is a fork
        os._exit(code)


def _run_program(module: ModuleType, fit: Fit, record: Record, call: str, broken: str) -> int:
    """Run a Fit, save its record, and return the exit code."""
    try:
        if broken:
            BREAKS[broken].apply()
        program = by_hand.fit if call == "plain" else getattr(module, call)
        before = peak_mb()
        with Reads() if fit.count_reads else contextlib.nullcontext() as reads:
            program(fit, record)
        record.values["grown_mb"] = peak_mb() - before
        if reads is not None:
            record.values["reads"] = reads.count
        record.save()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        record.save()
        return 1
    return 0


def peak_mb() -> float:
    """Return the most memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


class Reads(TorchDispatchMode):
    """Counts values that are read off the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and run the operation."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def default_launcher(trainer: str) -> str:
    """Return the launcher of a trainer's documentation."""
    return {"trainkit": "horovodrun", "Composer": "composer"}.get(trainer, "torchrun")


def launch_command(launcher: str, ranks: int, python: str = sys.executable) -> list[str]:
    """Return the beginning of a command that starts ranks of Python."""
    here = Path(python).parent
    if launcher == "horovodrun":
        return [str(here / "horovodrun"), "-np", str(ranks), python]
    if launcher == "composer":
        return [str(here / "composer"), "-n", str(ranks)]
    if launcher == "torchrun":
        return [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
    return [python]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _publish(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _wait_for(path: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not written within {limit_s} s")
        time.sleep(0.01)


def _end_of(pid: int, limit_s: float) -> int:
    """Return the exit code of a child, which is killed after the limit."""
    end = time.monotonic() + limit_s
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = TIMED_OUT
            break
        time.sleep(0.01)
    _end_group(pid)
    return code


def _end_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_marked(folder: str) -> None:
    """Kill ranks that outlive their launcher: their command names the folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if folder.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


__all__ = ["KILLED", "Cell", "FailsError", "NotSupportedError", "Outcome", "RefusedError"]
