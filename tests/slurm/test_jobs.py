"""fit with launcher=slurm on a real cluster:
signalled, preempted, cancelled and failing jobs, and `trainkit jobs`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.journals import Journal, check_samples, write_project
from tests.slurm.conftest import CPUS
from tests.slurm.jobs import TRAINKIT, Submitted, run_in, submit
from trainkit.checkpoint.format import verify

TWO_NODES = ("launcher.nodes=2", "launcher.exclude=n3")


@pytest.fixture(scope="module")
def limited(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """A job that needs longer than its time limit;
    Slurm looks at limits twice a minute, while the other tests run.
    """
    words = (
        "'launcher.time=\"01:00\"'",
        "launcher.signal=USR1@5",
        "task.pause_s=2",
        "launcher.cpus_per_task=1",
    )
    return submit(tmp_path_factory.mktemp("limited"), *TWO_NODES, *words)


@pytest.fixture(scope="module")
def undisturbed(
    limited: Submitted, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[float]]:
    """The weights of the same fit, by srun alone: its own test."""
    folder = tmp_path_factory.mktemp("srun")
    write_project(folder)
    done = run_in(
        folder,
        f"srun -N2 --ntasks=2 -x n3 {TRAINKIT} fit conf=journal trainer.lr_scaling=none run_dir=run"
        " task.pause_s=0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine         ddp, 2 ranks" in done.stdout
    (folder / "log").write_text(done.stdout)
    check_samples(Journal(folder))
    yield Journal(folder).ends()[0]["weights"]


def starts(job: Submitted) -> int:
    """Return how often a job's ranks were started."""
    return job.text.count("engine         ")


def test_srun_alone_starts_ranks_of_horovod(undisturbed: list[float], tmp_path: Path) -> None:
    """Three tasks on two nodes meet at rank 0 with a secret of the user's,
    and train as two ranks of ddp do.
    """
    write_project(tmp_path)
    line = (
        f"srun -N2 --ntasks=3 -x n3 {TRAINKIT} fit conf=journal engine=horovod run_dir=run"
        " task.pause_s=0"
    )
    done = run_in(
        tmp_path,
        f"export HOROVOD_RENDEZVOUS_SECRET=$(openssl rand -hex 32); {line} trainer.lr_scaling=none",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine         horovod, 3 ranks" in done.stdout
    (tmp_path / "log").write_text(done.stdout)
    check_samples(Journal(tmp_path))
    assert Journal(tmp_path).ends()[0]["weights"] == pytest.approx(undisturbed, rel=1e-6)


def test_horovod_without_a_common_secret_says_how_to_make_one(
    cluster: Path, tmp_path: Path
) -> None:
    """Before the ranks wait for one another."""
    write_project(tmp_path)
    done = run_in(
        tmp_path,
        f"srun --ntasks=2 --kill-on-bad-exit=1 {TRAINKIT} fit conf=journal engine=horovod"
        " run_dir=run",
    )
    assert done.returncode != 0
    assert "engine=horovod under srun needs a secret that all tasks share" in done.stderr
    assert "export HOROVOD_RENDEZVOUS_SECRET=$(openssl rand -hex 32)" in done.stderr


def test_a_signalled_job_is_queued_again_and_resumes(
    undisturbed: list[float], tmp_path: Path
) -> None:
    """Ranks of Horovod, USR1 by hand:
    a checkpoint, a second start of the same job, each step once, equal weights.
    """
    job = submit(tmp_path, *TWO_NODES, "engine=horovod", "task.pause_s=0.3")
    assert (
        f"[slurm] job {job.number} is submitted: 2 x 1 ranks" in job.printed
        and "elastic is off" in job.printed
    )
    job.wait_for_step(3)
    subprocess.run(["scancel", "--signal=USR1", str(job.number)], check=True)
    job.wait_for(lambda: "the run ended after step" in job.text, "its checkpoint")
    job.hurry()
    assert job.end() == "COMPLETED", job.text
    check_samples(job)
    assert starts(job) == 2 and job.shown("Restarts") == "1"
    assert job.sizes() == [2, 2] and job.ends()[0]["weights"] == undisturbed
    assert not list((tmp_path / "run" / "slurm").glob("requeue-*"))


def test_a_job_whose_ranks_still_start_python_is_queued_again(
    undisturbed: list[float], tmp_path: Path
) -> None:
    """SIGTERM to ranks that cannot handle it yet, as where Python comes from a slow disk:
    the job has another start.
    """
    python = tmp_path / "python"
    once = f"mark={tmp_path}/seen-$SLURM_PROCID; [ -e $mark ] || (touch $mark; sleep 300)"
    python.write_text(f'#!/bin/sh\n{once}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = submit(tmp_path, *TWO_NODES, f"launcher.python={python}", "task.pause_s=0")
    job.wait_for(lambda: len(list(tmp_path.glob("seen-*"))) == 2, "both ranks")
    subprocess.run(["scancel", "--signal=TERM", str(job.number)], check=True)
    assert job.end() == "COMPLETED", job.text
    check_samples(job)
    assert (
        starts(job) == 1
        and job.shown("Restarts") == "1"
        and job.ends()[0]["weights"] == undisturbed
    )


def test_a_preempted_job_is_queued_again_and_resumes(
    undisturbed: list[float], tmp_path: Path
) -> None:
    """A job of a partition with a higher priority takes the node:
    SIGTERM, a checkpoint, and no step is lost or repeated.
    """
    job = submit(tmp_path, "launcher.nodelist=n3", "launcher.ntasks_per_node=2", "task.pause_s=0.3")
    job.wait_for_step(3)
    urgent = [
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=1",
        "--nodelist=n3",
        f"--ntasks={CPUS}",
        "--output=/dev/null",
    ]
    done = subprocess.run([*urgent, "--wrap=sleep 1"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().isdecimal()
    job.wait_for(lambda: "SIGTERM on rank" in job.text, "SIGTERM and a checkpoint")
    job.hurry()
    assert job.end() == "COMPLETED", job.text
    check_samples(job)
    assert "DUE TO PREEMPTION" in job.text and starts(job) == 2 and job.shown("Restarts") == "1"
    assert job.ends()[0]["weights"] == undisturbed


def test_a_cancelled_job_leaves_a_checkpoint(cluster: Path, tmp_path: Path) -> None:
    """`jobs` lists it with its state, `logs` prints its output, `cancel` ends it;
    it is not queued again.
    """
    job = submit(tmp_path / "runs", *TWO_NODES, "task.pause_s=0.5", "logger=csv")
    folder = tmp_path / "runs" / "run"
    done = run_in(tmp_path, f"{TRAINKIT} fit conf=mlp launcher=slurm run_dir={folder}")
    assert (
        done.returncode == 2
        and f"for which job {job.number} is " in done.stderr
        and "already" in done.stderr
    )
    job.wait_for_step(2)
    (row,) = listed(tmp_path)
    assert (row["job"], row["state"], row["run"], row["run_dir"]) == (
        job.number,
        "RUNNING",
        "running",
        str(folder),
    )
    assert row["nodes"] == "n[1-2]" and row["partition"] == "main" and row["time_left"]
    table = run_in(tmp_path, f"{TRAINKIT} jobs").stdout
    assert str(job.number) in table and "RUNNING" in table and "runs/run" in table
    logs = run_in(tmp_path, f"{TRAINKIT} jobs logs {job.number}").stdout
    assert "engine         ddp, 2 ranks" in logs
    assert len(run_in(tmp_path, f"{TRAINKIT} jobs logs runs/run lines=1").stdout.splitlines()) == 1
    done = run_in(tmp_path, f"{TRAINKIT} jobs cancel runs/run")
    assert done.returncode == 0 and f"job {job.number} is cancelled" in done.stdout, done.stderr
    assert job.end() == "CANCELLED"
    job.wait_for(lambda: listed(tmp_path)[0]["run"] == "stopped", "the run's own state")
    step = int(re.findall(r"the run ended after step (\d+)", job.text)[0])
    assert (
        verify((folder / "checkpoints" / "last").resolve())["global_step"] == step
        and starts(job) == 1
    )
    again = run_in(tmp_path, f"{TRAINKIT} jobs cancel {job.number}")
    assert again.returncode == 2 and f"Job {job.number} is CANCELLED already" in again.stderr


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return `jobs --json`."""
    done = run_in(folder, f"{TRAINKIT} jobs --json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_users_error_ends_the_job(cluster: Path, tmp_path: Path) -> None:
    """What rank 1 raises is in the output, srun ends rank 0, which waits for it,
    and the job is not queued again.
    """
    job = submit(tmp_path, *TWO_NODES, "task.fails_at=-1")
    assert job.end() == "FAILED", job.text
    assert job.text.count("a mistake of the user's") == 1 and job.shown("Restarts") == "0"


def test_what_slurm_refuses_is_shown_in_its_words(cluster: Path, tmp_path: Path) -> None:
    """With the partitions that there are; no folder of a run is left, and no job."""
    line = f"{TRAINKIT} fit conf=mlp launcher=slurm run_dir=run"
    done = run_in(tmp_path, f"{line} launcher.partition=gpu")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "nothing was submitted: invalid partition specified: gpu" in done.stderr
    assert "Partitions here: main, urgent; choose one: launcher.partition=main" in done.stderr
    done = run_in(
        tmp_path,
        f"{line} launcher.extra={{licenses: matlab}}".replace(
            "{licenses: matlab}", "'{licenses: matlab}'"
        ),
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "Invalid license specification" in done.stderr and "Traceback" not in done.stderr


def test_a_job_that_can_never_start_is_said(cluster: Path, tmp_path: Path) -> None:
    """Slurm takes a job whose time is above its partition's, and lets it wait forever;
    the line's command ends it.
    """
    place = "launcher.partition=urgent launcher.time=1-00 run_dir=here/run"
    done = run_in(tmp_path, f"{TRAINKIT} fit conf=mlp launcher=slurm {place}")
    assert done.returncode == 0, done.stderr
    assert (
        "cannot start: PartitionTimeLimit in partition urgent, which is about launcher.time"
        in done.stdout
    )
    (tmp_path / "elsewhere").mkdir()
    command = done.stdout.strip().rpartition("python -m trainkit ")[2]
    ended = run_in(tmp_path / "elsewhere", f"{TRAINKIT} {command}")
    assert ended.returncode == 0 and "is cancelled: it had not started" in ended.stdout, (
        ended.stderr
    )


def test_a_time_limit_is_one_run(limited: Submitted, undisturbed: list[float]) -> None:
    """Slurm itself signals before the limit;
    the job is queued again until the fit ends, with each step once.
    """
    limited.wait_for(lambda: "SIGUSR1 on rank 0" in limited.text, "Slurm's signal")
    limited.hurry()
    assert limited.end() == "COMPLETED", limited.text
    check_samples(limited)
    assert starts(limited) >= 2 and int(limited.shown("Restarts")) == starts(limited) - 1
    assert limited.ends()[0]["weights"] == undisturbed
