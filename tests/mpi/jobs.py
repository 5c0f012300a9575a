"""Commands under mpirun and horovodrun --mpi, with the Horovod that was built with MPI."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.journals import Journal, wait_until, write_project
from tests.helpers.launching import BIN, Done, run_command

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.prefix) / "mpi"
FIT = "python -m trainkit fit"
JOURNAL = "conf=journal trainer.lr_scaling=none run_dir=run"
LIMIT_S = 240.0  # loaded machines are slow
# What Open MPI needs on a machine of tests: root, more ranks than cores, and ranks that give up
# their core while they wait.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of a user in a folder, to whom `horovod` is the one with MPI."""
    return OPEN_MPI | {
        "PATH": os.pathsep.join([str(BESIDE / "bin"), str(BIN), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(BESIDE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TRAINKIT_JOURNAL": str(folder),
    }


def run(line: str, folder: Path, **more: str) -> Done:
    """Run a shell command in a folder; nothing that it started outlives it."""
    return run_command(line, folder, LIMIT_S, **variables(folder) | more)


@dataclass
class Job(Journal):
    """A fit of the journal's task under a launcher, in its folder's "run";
    a context manager that leaves no process behind.
    """

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, line: str) -> Job:
        """Start a shell command without waiting for it; `log` gets its output."""
        write_project(folder)
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))
        } | variables(folder)
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                line,
                shell=True,
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return cls(folder, process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        # ranks outlive their launcher, each in a group of its own
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # gone by now
                    if f"TRAINKIT_JOURNAL={self.folder}".encode() in (
                        folder / "environ"
                    ).read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)
        self.process.wait()

    def wait_for_step(self, step: int) -> None:
        """Wait until a step, or a later one, is trained."""
        wait_until(lambda: self.has_step(step), LIMIT_S, lambda: f"step {step}\n{self.text}")

    def end(self) -> int:
        """Wait for the launcher's end; return its exit code."""
        return self.process.wait(LIMIT_S)
