"""`ray job submit` and `stop`, two jobs that want the same resources,
and what a real cluster refuses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.launching import BIN
from tests.ray.conftest import NODE, ROOT, cluster_utils
from tests.ray.jobs import check_samples, started, wait_for, write_project
from trainkit.checkpoint.format import verify

FIT = "python -m trainkit fit conf=journal launcher=ray"


def ray_job(cluster: Any, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `ray job ...` as a user does; its output."""
    address = f"http://{cluster.head_node.address_info['webui_url']}"
    command = [str(BIN / "ray"), "job", words[0], "--address", address, *words[1:]]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def jobs(cluster: Any, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `trainkit jobs ...` as a user does; its output."""
    address = f"http://{cluster.head_node.address_info['webui_url']}"
    command = [sys.executable, "-m", "trainkit", "jobs", *words]
    environment = os.environ | {"RAY_API_SERVER_ADDRESS": address}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def state_of(cluster: Any, job: str, cwd: Path) -> str:
    """Return the state of a job in `trainkit jobs --json`."""
    done = jobs(cluster, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    states = {row["job"]: row["state"] for row in json.loads(done.stdout)}
    return str(states[job])


def test_a_submitted_job_runs_and_stops(cluster: Any, tmp_path: Path) -> None:
    """Its output has the ranks; stopping it leaves a checkpoint, from which the same command
    resumes to the end.

    `trainkit jobs` lists it, prints its output, and stops it as `ray job stop` does.
    """
    write_project(tmp_path)
    fit = [
        sys.executable,
        *FIT.split()[1:],
        f"run_dir={tmp_path}/run",
        "resume=auto",
        "task.pause_s=1",
    ]
    variables = {"TRAINKIT_JOURNAL": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = (
        "--working-dir",
        ".",
        "--runtime-env-json",
        json.dumps({"env_vars": variables}),
        "--submission-id",
    )
    # a new cluster takes no jobs for some seconds
    command = ("submit", *given, "first", "--no-wait", "--", *fit)
    wait_for(
        lambda: ray_job(cluster, *command, cwd=tmp_path).returncode == 0, "a job", timeout_s=300
    )
    try:
        wait_for(lambda: any(tmp_path.glob("journal-*")), "training", timeout_s=300)
    except AssertionError:
        raise AssertionError(ray_job(cluster, "logs", "first", cwd=tmp_path).stdout) from None
    assert state_of(cluster, "first", tmp_path) == "RUNNING"
    assert "engine         horovod, 2 ranks" in jobs(cluster, "logs", "first", cwd=tmp_path).stdout
    assert (
        "job first is cancelled: the ranks save"
        in jobs(cluster, "cancel", "first", cwd=tmp_path).stdout
    )
    wait_for(lambda: state_of(cluster, "first", tmp_path) == "CANCELLED", "its end")
    again = jobs(cluster, "cancel", "first", cwd=tmp_path)
    assert again.returncode == 2 and "Job first is CANCELLED already" in again.stderr
    text = ray_job(cluster, "logs", "first", cwd=tmp_path).stdout
    found = re.search(r"the run ended after step (\d+)", text)
    assert found and "the job ends with exit code 75" in text, text
    (tmp_path / "hurry").touch()
    again = ray_job(cluster, "submit", *given, "second", "--", *fit, cwd=tmp_path)
    assert again.returncode == 0 and "Job 'second' succeeded" in again.stdout, (
        again.stdout + again.stderr
    )
    assert "[0]<stdout>:engine         horovod, 2 ranks" in again.stdout
    with started(tmp_path, command="true") as job:
        check_samples(job)


def test_two_jobs_share_a_cluster_one_after_the_other(cluster: Any, tmp_path: Path) -> None:
    """Both want three of four CPUs: the second says what it waits for, and both end."""
    words = ("launcher.num_workers=3", "task.pause_s=0.05")
    with started(tmp_path / "first", *words) as first:
        first.wait_for_step(0, ranks=3)
        with started(tmp_path / "second", *words) as second:
            wait_for(
                lambda: "[elastic] waiting for 3 x {CPU: 1} (PACK); free now: " in second.text,
                "the wait",
                second,
            )
            assert first.process.poll() is None
            assert (first.end(), second.end()) == (0, 0), first.text + second.text
        check_samples(second)
    check_samples(first)


def test_workers_that_never_come_are_reported(cluster: Any, tmp_path: Path) -> None:
    """After start_timeout_s: what was asked, and what is free;
    exit code 2, and no folder of a run.
    """
    with started(tmp_path, "launcher.num_workers=9", "launcher.start_timeout_s=2") as job:
        assert job.end() == 2
    text = (
        r"Error: launcher.num_workers asks for 9 x \{CPU: 1\} \(PACK\), and they did not come"
        r" within 2 s .*free now: .*CPU"
    )
    assert re.search(text, job.text), job.text
    assert not (tmp_path / "run").exists() and "Traceback" not in job.text


def test_sigterm_while_workers_are_waited_for_ends_the_job(cluster: Any, tmp_path: Path) -> None:
    """With a sentence, in place of Ray's addresses of its C++ code;
    no colours are in the file that it is written to.
    """
    with started(tmp_path, "launcher.num_workers=9") as job:
        wait_for(lambda: "[elastic] waiting for 9 x {CPU: 1}" in job.text, "the wait", job)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143, job.text
    assert (
        "SIGTERM received: this process ends, and with it what it has on the Ray cluster"
        in job.text
    )
    assert "*** SIGTERM" not in job.text and "PC: @" not in job.text and "\x1b" not in job.text, (
        job.text
    )


def test_a_folder_that_is_not_shared_is_found_before_training(cluster: Any, tmp_path: Path) -> None:
    """With a working_dir of Ray's the ranks' current folder is a copy:
    a relative run_dir is another folder there.
    """
    with started(tmp_path, "launcher.runtime_env={working_dir: .}") as job:
        assert job.end() == 2, job.text
    text = (
        r"Error: run_dir is 'run', and \S+ does not see it \(its folder is \S+\): it is not shared"
    )
    assert re.search(text, job.text), job.text
    assert not list(tmp_path.glob("journal-*")) and not (tmp_path / "run").exists()


def test_an_environment_that_cannot_be_made_is_reported(cluster: Any, tmp_path: Path) -> None:
    """A runtime_env with a Python that no node has: a sentence, and no actor's traceback."""
    environment = "{py_executable: /nowhere/python}"
    with started(
        tmp_path, f"launcher.runtime_env={environment}", "launcher.start_timeout_s=15"
    ) as job:
        assert job.end() == 2, job.text
    assert re.search(
        r"No worker can be started on \S+: its actor did not start within 15 s", job.text
    ), job.text
    assert "Traceback" not in job.text, job.text


def test_an_environment_without_horovod_is_reported(cluster: Any, tmp_path: Path) -> None:
    """A runtime_env in whose PYTHONPATH another horovod comes first:
    the node is named, with what to do.
    """
    (tmp_path / "other" / "horovod").mkdir(parents=True)
    (tmp_path / "other" / "horovod" / "__init__.py").touch()
    environment = f"{{env_vars: {{PYTHONPATH: '{tmp_path}/other:{ROOT}'}}}}"
    with started(tmp_path, f"launcher.runtime_env={environment}") as job:
        assert job.end() == 2, job.text
    assert re.search(
        r"The workers' environment on \S+ has no Horovod. Run `python -m trainkit horovod install`",
        job.text,
    ), job.text
    assert "Traceback" not in job.text and not list(tmp_path.glob("journal-*"))


def test_a_lost_head_ends_the_job_with_a_checkpoint(cluster: Any, tmp_path: Path) -> None:
    """The head's server is killed on a cluster of its own:
    exit code 75 within seconds, and the checkpoint is whole.
    """
    other = cluster_utils.Cluster(
        initialize_head=True, head_node_args=NODE | {"include_dashboard": False}
    )
    try:
        with started(tmp_path, "trainer.max_epochs=400", RAY_ADDRESS=other.address) as job:
            job.wait_for_step(3)
            other.head_node.kill_gcs_server()
            assert job.end() == 75, job.text
        assert (
            "the head of the Ray cluster" in job.text
            and "the job ends with a checkpoint" in job.text
        )
        (last,) = {int(found) for found in re.findall(r"the run ended after step (\d+)", job.text)}
        assert verify((tmp_path / "run" / "checkpoints" / "last").resolve())["global_step"] == last
    finally:
        other.shutdown()
