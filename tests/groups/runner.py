"""Runs groups side by side, as many as the cores carry; the output of each goes to
build/tests/NAME.log.

A group starts if all that then run keep at most a core more busy than there are; the first always
starts. Programs of all groups are forks of one server (tests/helpers/forks.py). What fails is
printed when its group ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.groups.plugin import BUILD, TO_KEEP
from tests.groups.table import ROOT, Group
from tests.helpers.forks import SHARED, USED, Forks

_FAILURES = re.compile(r"^=+ (?:FAILURES|ERRORS) =+$", re.MULTILINE)
_MOST_LINES = 150


@dataclass
class Ended:
    """A group that ended.

    Attributes:
        record: as plugin.Recorder writes it, or as `_plain_record` makes it; with the seconds of
            processors that it and its forks used ("cpu_s"), but for those of programs that left
            its process tree.
        crowding: the most cores that groups kept busy meanwhile, by those that there are; at least
            1.
    """

    group: Group
    record: dict[str, Any]
    crowding: float

    @property
    def is_green(self) -> bool:
        """Whether all its tests passed or were skipped."""
        return self.record["exit"] == 0 and not self.record["failed"]

    @property
    def budget_s(self) -> float:
        """The seconds that it may take beside the groups that ran at the same time."""
        return self.group.budget_s * self.crowding

    @property
    def is_over_budget(self) -> bool:
        """Whether it took longer than its budget."""
        return bool(self.record["seconds"] > self.budget_s)


class _Running:
    def __init__(self, group: Group, options: list[str], forks: Forks | None) -> None:
        self.group, self.start, self.crowding = group, time.monotonic(), 1.0
        self.cpu_s = 0.0
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / f"{group.name}.json").unlink(missing_ok=True)
        self.log = BUILD / f"{group.name}.log"
        self._used = BUILD / f"{group.name}.used"
        self._used.unlink(missing_ok=True)
        root = str(ROOT)
        environment = {key: value.format(root=root) for key, value in group.environment.items()}
        if forks is not None and _has_forks(group):
            environment |= {SHARED: forks.named, USED: str(self._used)}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command_of(group, options),
                shell=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    **_of_tests(),
                    **environment,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a shell that starts a command in its background has it ignore SIGINT
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )

    def has_ended(self) -> bool:
        """Return whether its process has ended, and note what it used with all that it waited for."""
        if self.process.returncode is not None:
            return True
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        if self._used.exists():
            self.cpu_s += sum(map(float, self._used.read_text().split()))
        return True

    def ended(self) -> Ended:
        code = self.process.returncode
        file = BUILD / f"{self.group.name}.json"
        is_of_pytest = file.is_file()
        record = json.loads(file.read_text()) if is_of_pytest else _plain_record(code)
        record |= {"exit": code, "cpu_s": round(self.cpu_s, 1)}
        if is_of_pytest:
            file.write_text(json.dumps(record, indent=0))
        record["seconds"] = round(time.monotonic() - self.start, 1)  # with what prepares it
        return Ended(self.group, record, self.crowding)


def _has_forks(group: Group) -> bool:
    """Whether its programs are forks of the run's server: those of a group with an environment of its
    own are forks of one with that.
    """
    return bool(group.tests) and not group.environment


def _start_forks() -> Forks:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "forks.log").open("w") as log:
        return Forks(log, **_of_tests())


def _bytecode() -> dict[str, str]:
    """Return what has Python keep its bytecode beside the environment, as make does, in a shell that
    asks for none (as images often do): without it each process compiles torch.
    """
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{sys.prefix}/bytecode"}


def _of_tests() -> dict[str, str]:
    """Return the variables of all groups, and of the server of their forks."""
    # Threads of OpenMP that spin while they wait take the cores of other tests' processes.
    threads = {"OMP_WAIT_POLICY": "passive"}
    threads["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return _bytecode() | threads


def command_of(group: Group, options: list[str]) -> str:
    """Return the shell command of a group.

    Args:
        options: further arguments of pytest.
    """
    commands = [group.prepare] if group.prepare else []
    commands += group.commands
    if group.tests:
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--group",
            group.name,
            *group.paths,
            *options,
        ]
        if group.workers:
            words += ["-n", str(group.workers), "--dist", group.dist]
        commands.append(shlex.join(words))
    return " && ".join(commands)


def _plain_record(code: int) -> dict[str, Any]:
    """Return the record of a group without pytest: its commands are one test."""
    counts = {"passed": int(code == 0), "failed": int(code != 0), "skipped": 0}
    return {"seconds": 0.0, "exit": code, **counts, "started": 0, "skips": {}, "tests": {}}


def run_groups(
    groups: list[Group],
    options: list[str],
    out: TextIO = sys.stdout,
    on_end: Callable[[Ended], object] = bool,
) -> list[Ended]:
    """Run groups; return them as they ended.

    Args:
        options: further arguments of pytest.
        on_end: is called with each group when it ends.
    """
    cores = os.cpu_count() or 1
    waiting, running, ended = list(groups), [], []
    forks = _start_forks() if any(map(_has_forks, groups)) else None
    try:
        while waiting or running:
            for group in list(waiting):
                busy = sum(other.group.cores for other in running)
                if not running or busy + group.cores <= cores + 1:
                    waiting.remove(group)
                    running.append(_Running(group, options, forks))
                    print(f"{group.name:<10} runs: {group.about}", file=out, flush=True)
            busy = sum(other.group.cores for other in running)
            for one in running:
                one.crowding = max(one.crowding, busy / cores)
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                ended.append(one.ended())
                on_end(ended[-1])
                print(_line(ended[-1]), file=out, flush=True)
                if not ended[-1].is_green:
                    print(failures(one.log.read_text(errors="replace")), file=out, flush=True)
            time.sleep(0.2)
    finally:
        try:
            _interrupt(running)
        finally:
            if forks is not None:
                forks.close()
    return ended


def _interrupt(running: list[_Running]) -> None:
    """End groups before their time: fixtures have up to 20 s to end what they started."""
    sessions = [one.process.pid for one in running]
    until = time.monotonic() + 20
    try:
        _signal(sessions, signal.SIGINT)
        while running and time.monotonic() < until:
            running = [one for one in running if not one.has_ended()]
            time.sleep(0.05)
    finally:
        _signal(sessions, signal.SIGKILL)
        while not all(one.has_ended() for one in running):
            time.sleep(0.01)


def _signal(sessions: list[int], number: signal.Signals) -> None:
    for session in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, number)


def _line(end: Ended) -> str:
    record = end.record
    counts = ", ".join(
        f"{record[what]} {what}" for what in ("passed", "failed", "skipped") if record[what]
    )
    over = (
        f"; over its budget of {end.budget_s:.0f} s"
        if end.is_over_budget
        else f" of {end.budget_s:.0f} s"
    )
    return (
        f"{end.group.name:<10} {counts or 'ended with ' + str(record['exit'])} in"
        f" {record['seconds']:.0f} s{over}"
    )


def failures(text: str) -> str:
    """Return the part of a log that explains a failure: pytest's, or the last lines."""
    start = _FAILURES.search(text)
    lines = text[start.start() if start else 0 :].splitlines()
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    if not start:
        return "\n".join(lines[-_MOST_LINES:])
    ends = [line for line in lines[_MOST_LINES:] if line.startswith(("FAILED", "ERROR", TO_KEEP))]
    return "\n".join([*lines[:_MOST_LINES], "...", *ends])
