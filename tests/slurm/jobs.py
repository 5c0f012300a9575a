"""Submits fits to the tests' cluster, and reads what Slurm and the ranks say of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.journals import Journal, wait_until, write_project

TRAINKIT = f"{sys.executable} -m trainkit"
_LIMIT_S = 240.0  # loaded machines are slow


@dataclass
class Submitted(Journal):
    """A job of a fit in a folder, in which the run's folder is "run"."""

    number: int
    printed: str

    @property
    def text(self) -> str:
        """What the job has printed."""
        log = self.folder / "run" / "slurm" / f"{self.number}.out"
        return log.read_text() if log.exists() else "(no output)"

    def shown(self, field: str) -> str:
        """Return what `scontrol show job` prints for a field, as "JobState"."""
        done = subprocess.run(
            ["scontrol", "show", "job", str(self.number)],
            capture_output=True,
            text=True,
            check=True,
        )
        return re.findall(rf"\b{field}=(\S+)", done.stdout)[0]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        wait_until(
            condition, _LIMIT_S, lambda: f"{what}\n{self.shown('JobState')}\n{self.text[-3000:]}"
        )

    def wait_for_step(self, step: int, ranks: int = 2) -> None:
        """Wait until a step, or a later one, is trained."""
        self.wait_for(lambda: self.has_step(step, ranks), f"step {step}")

    def end(self) -> str:
        """Wait for the end; return the job's last state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.shown("JobState") in ended, "its end")
        return self.shown("JobState")


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a user with a project in a folder."""
    left_out = ("HOROVOD_", "PYTEST_")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)} | {
        "TRAINKIT_JOURNAL": str(folder)
    }


def run_in(folder: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a folder."""
    env = environment(folder) | variables
    return subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
    )


def submit(folder: Path, *words: str) -> Submitted:
    """Submit a fit of the journal's task on two ranks,
    by default on a node each; return its job.
    """
    write_project(folder)
    line = " ".join(
        [
            (
                "fit conf=journal trainer.lr_scaling=none run_dir=run launcher=slurm"
                " launcher.partition=main"
            ),
            *words,
        ]
    )
    # the setting holds, and not the variable of the shell
    done = run_in(folder, f"{TRAINKIT} {line}", SBATCH_PARTITION="urgent")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (folder / "run" / "slurm" / "jobs.jsonl").read_text().splitlines()[-1:]
    return Submitted(folder, json.loads(line)["job"], done.stdout)
