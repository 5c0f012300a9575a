"""Faults under the real launchers:
a rank dies, the launcher is asked to end, the job is restarted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.faults.jobs import ROOT, WORKERS, wait_for
from tests.faults.test_kills import assert_same_run, newest
from tests.helpers.launching import BIN, run_command
from trainkit.checkpoint.format import verify

pytestmark = pytest.mark.parallel

JOB = WORKERS / "job.py"
STEPS = 60
HOROVODRUN = f"horovodrun --gloo -np 2 python {JOB}"
TORCHRUN = f"torchrun --nproc-per-node 2 {JOB}"


def finish(line: str, run_dir: Path, **environment: str) -> str:
    """Run a job to its end and return its output."""
    done = run_command(
        f"{line} {run_dir} {STEPS}", run_dir.parent, 120, PYTHONPATH=str(ROOT), **environment
    )
    assert done.code == 0, done.text
    return done.text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on Horovod without a fault."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    finish(HOROVODRUN, run_dir)
    return run_dir


def ranks_of(run_dir: Path) -> list[int]:
    """Return the process ids of a job's ranks, the launchers left out."""
    ranks = []
    for folder in Path("/proc").iterdir():
        try:
            words = (
                (folder / "cmdline").read_bytes().decode().split("\0")
                if folder.name.isdigit()
                else []
            )
            a_rank = str(JOB) in words[:3] and str(run_dir) in words
            a_rank = a_rank and b"_RANK=" in (folder / "environ").read_bytes()
            parent = (
                int((folder / "stat").read_text().rpartition(")")[2].split()[1]) if a_rank else 0
            )
            if (
                a_rank
                and str(JOB)
                not in (Path("/proc") / str(parent) / "cmdline")
                .read_bytes()
                .decode()
                .split("\0")[:3]
            ):
                ranks.append(int(folder.name))
        except OSError:
            continue
    return sorted(ranks)


def disturb(line: str, run_dir: Path, number: signal.Signals, whom: str) -> tuple[int, str]:
    """Start a job, send a signal to a rank or to the launcher once it trains,
    and return how it ended.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
    log = run_dir.with_suffix(".log")
    with log.open("w") as out:
        command = [*line.split(), str(run_dir), str(STEPS)]
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_for((run_dir / "stepping").exists, "the first step")
            wait_for((run_dir / "checkpoints" / "last").exists, "the first checkpoint")
            os.kill(process.pid if whom == "launcher" else ranks_of(run_dir)[-1], number)
            code = process.wait(60)
        finally:
            for pid in [*ranks_of(run_dir), process.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    return code, log.read_text()


def test_a_rank_that_is_killed_under_horovodrun_costs_a_restart(
    tmp_path: Path, whole: Path
) -> None:
    """SIGKILL of one rank ends the job;
    restarted with "auto" it ends like the run without a fault.
    """
    code, _ = disturb(HOROVODRUN, tmp_path / "run", signal.SIGKILL, "rank")
    assert code != 0
    finish(HOROVODRUN, tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("line", "whom"), [(HOROVODRUN, "launcher"), (HOROVODRUN, "rank"), (TORCHRUN, "launcher")]
)
def test_a_job_that_is_asked_to_end_leaves_a_checkpoint(
    tmp_path: Path, whole: Path, line: str, whom: str
) -> None:
    """After SIGTERM to the launcher or to one rank all ranks end at one step with a checkpoint,
    and the job resumes from it.
    """
    _, text = disturb(line, tmp_path / "run", signal.SIGTERM, whom)
    match = re.search(r"SIGTERM on rank \d.*: the run ended after step (\d+); to resume", text)
    assert match, text
    assert verify(newest(tmp_path / "run"))["global_step"] == int(match[1])
    finish(line, tmp_path / "run")
    if line == HOROVODRUN:
        assert_same_run(whole, tmp_path / "run")


def test_torchruns_restart_resumes(tmp_path: Path) -> None:
    """Under torchrun --max-restarts a rank that dies is restarted with the others,
    from the last checkpoint.
    """
    finish(TORCHRUN, tmp_path / "whole")
    finish(
        f"torchrun --nproc-per-node 2 --max-restarts 1 {JOB}", tmp_path / "run", JOB_DIES_AT="17"
    )
    assert (tmp_path / "run" / "died").exists()
    assert_same_run(tmp_path / "whole", tmp_path / "run")
