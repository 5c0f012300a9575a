"""Starting jobs of several ranks."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path

from trainkit.extensions.programs.local import launcher_of, run_job, start_with
from trainkit.launch.environment import read_launcher, without_launcher


def test_one_rank_needs_no_launcher() -> None:
    """One rank is this Python alone;
    several are started by the launcher of the engine, with this Python.
    """
    assert start_with("torchrun", 1) == [sys.executable]
    assert start_with("torchrun", 1, "fsdp")[-2:] == ["--nproc-per-node", "1"]
    assert start_with("torchrun", 3)[-2:] == ["--nproc-per-node", "3"]
    assert start_with("horovodrun", 2)[-4:] == ["-np", "2", "--gloo", sys.executable]
    assert launcher_of("ddp") == "torchrun"


def test_a_job_has_no_launcher_above_it() -> None:
    """A launcher's variables are removed from the environment, and the user's own settings stay."""
    env = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_CYCLE_TIME": "5", "HOME": "here"}
    assert read_launcher(env).world_size == 2
    assert without_launcher(env) == {"HOROVOD_CYCLE_TIME": "5", "HOME": "here"}
    assert read_launcher(without_launcher(env)).name == "none"
    of_mpi = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert without_launcher(of_mpi | {"OMPI_COMM_WORLD_SIZE": "2"}) == {}


def test_nothing_that_a_job_started_outlives_it(tmp_path: Path) -> None:
    """A job's output is in its log, its exit code is returned,
    and its remaining processes are ended.
    """
    script = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
        " sys.exit(3)"
    )
    assert run_job([sys.executable, "-c", script], tmp_path / "log", {}) == 3
    with contextlib.suppress(ProcessLookupError):  # it is gone
        left = os.pidfd_open(int((tmp_path / "log").read_text()))
        assert select.select([left], [], [], 10)[0], "what was left running has not ended"
        os.close(left)
