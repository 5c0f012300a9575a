"""Starts fits with launcher=ray on the tests' cluster, and disturbs them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.journals import Journal, check_samples, wait_until
from tests.helpers.journals import write_project as write_journal_project
from tests.helpers.launching import path
from tests.ray.conftest import ROOT

__all__ = ["check_samples", "started", "wait_for", "write_project"]
_ELASTIC = "callbacks: {elastic: {_target_: trainkit.callbacks.Elastic, commit_every_n_steps: 1}}\n"


@dataclass
class Started(Journal):
    """A job that was started in a folder; `process` is the driver."""

    process: subprocess.Popen[bytes]

    def wait_for_step(self, step: int, ranks: int = 2) -> list[dict[str, Any]]:
        """Wait until a step is trained on so many ranks; return the journals' lines."""
        wait_for(lambda: self.has_step(step, ranks), f"step {step} on {ranks} ranks", self)
        return self.lines()

    def end(self, timeout_s: float = 240) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the job did not end within {timeout_s} s:\n{self.text[-3000:]}"
            ) from None


def wait_for(
    condition: Callable[[], bool], what: str, job: Started | None = None, timeout_s: float = 240
) -> None:
    """Poll a condition; fail if it does not hold in time, or if the job has ended."""

    def holds() -> bool:
        if condition():
            return True
        assert job is None or job.process.poll() is None, (
            f"the job ended before {what}\n{job.text[-3000:]}"
        )
        return False

    wait_until(holds, timeout_s, lambda: what if job is None else f"{what}\n{job.text[-3000:]}")


def write_project(folder: Path) -> None:
    """Write a user's project: a conf, and the module of its Task."""
    write_journal_project(folder, _ELASTIC)


@contextlib.contextmanager
def started(folder: Path, *words: str, command: str = "", **environment: str) -> Iterator[Started]:
    """Start a fit in a folder, or another command; nothing of it is left at the end."""
    write_project(folder)
    line = "python -m trainkit fit conf=journal launcher=ray run_dir=run"
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOROVOD_", "PYTEST_"))
    }
    env |= {"PYTHONPATH": str(ROOT), "JOURNAL": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {"PATH": path()} | environment
    env |= {"TRAINKIT_JOURNAL": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*(command or line).split(), *words],
            cwd=folder,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Started(folder, process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
