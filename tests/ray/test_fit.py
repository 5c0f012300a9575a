"""fit with launcher=ray on a real cluster:
like horovodrun's, whatever happens to ranks and nodes.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2

from tests.ray.conftest import NODE
from tests.ray.jobs import check_samples, started, wait_for

HOROVODRUN = "horovodrun --gloo -np 2 python -m trainkit fit conf=journal run_dir=run"


def parent_of(pid: int) -> int:
    """Return a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of the same fit under horovodrun."""
    with started(tmp_path_factory.mktemp("horovodrun"), command=HOROVODRUN) as job:
        assert job.end() == 0, job.text
        return list(job.ends()[0]["weights"])


def drain(cluster: Any, node: Any) -> None:
    """Announce that a node will go in a minute, as a cloud does of a spot machine."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    GcsClient(address=cluster.address).drain_node(
        node.node_id, reason, "spot", int(time.time() * 1000) + 60_000
    )


def test_two_ranks_end_with_horovodruns_weights(
    cluster: Any, tmp_path: Path, undisturbed: list[float]
) -> None:
    """The same command gives the same weights, bit for bit,
    and each line of output has its rank.
    """
    with started(tmp_path, "task.pause_s=0") as job:
        assert job.end() == 0, job.text
    check_samples(job)
    assert job.ends()[0]["weights"] == undisturbed
    assert "[0]<stdout>:engine         horovod, 2 ranks" in job.text
    assert job.text.splitlines()[-1] == "[elastic] done"
    assert not list((tmp_path / "run").glob(".shared-*"))


def test_killed_processes_are_replaced(
    cluster: Any, tmp_path: Path, undisturbed: list[float]
) -> None:
    """SIGKILL of a rank, then of the actor above another one, whose child ends too:
    no sample and no completed step is lost.
    """
    # a start without a fork (tests/helpers/forks.py): its parent is the actor
    real = "launcher.runtime_env={env_vars: {PYTHONHASHSEED: '0'}}"
    with started(tmp_path, real) as job:
        job.wait_for_step(3)
        os.kill(job.pids()[1], signal.SIGKILL)
        wait_for(lambda: job.sizes()[1:] == [2], "a second generation", job)
        wait_for(lambda: is_alive(job.pids()[1]), "its second rank", job)
        pid = job.pids()[1]
        os.kill(parent_of(pid), signal.SIGKILL)
        # SIGTERM waits until the rank has started; SIGKILL comes after 30 s.
        wait_for(lambda: not is_alive(pid), "the end of the actor's rank", timeout_s=45)
        job.hurry()
        assert job.end() == 0, job.text
    check_samples(job, repeated=24)
    assert job.ends()[0]["weights"] == pytest.approx(undisturbed, rel=1e-6)
    assert (
        "was lost: its actor or its node has ended; 1 rank waits for 1 more (launcher.num_workers)"
        in job.text
    )
    assert "ssh" not in job.text


@pytest.mark.parametrize("engine", ["ddp", "fsdp engine.replicas=2"])
def test_a_killed_rank_of_torchs_engines_is_replaced(
    engine: str, cluster: Any, tmp_path: Path, undisturbed: list[float]
) -> None:
    """The other rank continues in its process, in a new group of torch's, and each sample counts
    once: the weights are those of a run without a kill. No Horovod is asked for.
    """
    with started(tmp_path, *f"engine={engine}".split()) as job:
        job.wait_for_step(3)
        killed, other = job.pids()[1], job.pids()[0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: job.sizes()[1:] == [2], "a second generation", job)
        job.hurry()
        assert job.end() == 0, job.text
    if engine == "ddp":  # replicas finish the step under way with the lost one's samples
        check_samples(job, repeated=24)
    assert job.ends()[0]["weights"] == pytest.approx(undisturbed, rel=1e-6)
    assert job.pids()[0] == other and job.pids()[1] != killed
    assert f"[0]<stdout>:engine         {engine.split()[0]}, 2 ranks" in job.text


def test_nodes_come_and_drain_and_go(cluster: Any, tmp_path: Path) -> None:
    """An elastic job grows when a node comes, leaves one that drains without repeating a sample,
    and survives a dead raylet.
    """
    spot = NODE | {"num_cpus": 1, "resources": {"spot": 1}}
    nodes = [cluster.add_node(**spot)]
    words = (
        "launcher.num_workers=[1,2]",
        "launcher.resources_per_worker={CPU: 1, spot: 1}",
        "task.pause_s=0.2",
        "trainer.max_epochs=40",
    )
    try:
        with started(tmp_path, *words) as job:
            job.wait_for_step(1, ranks=1)
            nodes.append(cluster.add_node(**spot))
            job.wait_for_step(2, ranks=2)
            drain(cluster, nodes[0])
            wait_for(lambda: job.sizes() == [1, 2, 1], "the end of the drained node's rank", job)
            check_no_repeats(job)
            nodes.append(cluster.add_node(**spot))
            wait_for(lambda: job.sizes() == [1, 2, 1, 2], "growth onto the third node", job)
            job.wait_for_step(1, ranks=2)
            cluster.remove_node(nodes.pop(1), allow_graceful=False)
            wait_for(
                lambda: job.sizes() == [1, 2, 1, 2, 1], "the generation without the dead node", job
            )
            job.hurry()
            assert job.end() == 0, job.text
        check_samples(job, epochs=40, repeated=12)
    finally:
        for node in nodes:
            cluster.remove_node(node)


def check_no_repeats(job: Any) -> None:
    """No sample of an epoch was trained twice so far."""
    seen = [(line["epoch"], i) for line in job.lines() for i in line["ids"]]
    assert len(seen) == len(set(seen)), job.text


def test_an_error_of_the_users_ends_the_job(cluster: Any, tmp_path: Path) -> None:
    """What rank 1 raises reaches the driver's output with its traceback, once,
    and its exit code is the job's.
    """
    with started(tmp_path, "task.fails_at=2", "launcher.num_workers=2") as job:
        assert job.end() == 1, job.text
    assert job.text.count("ValueError: a mistake of the user's") == 1
    assert re.search(
        r"the job ends with exit code 1: rank 1 .* ended with exit code 1: see its output", job.text
    )


def test_an_exit_of_the_users_ends_the_job_with_its_code(cluster: Any, tmp_path: Path) -> None:
    """The code of sys.exit is the job's, as under `python -m trainkit launch`: the rank is not
    replaced, again and again.
    """
    words = ("task.fails_at=2", "+task.exit_code=7", "launcher.num_workers=2")
    with started(tmp_path, *words) as job:
        assert job.end() == 7, job.text
    assert "the job ends with exit code 7: rank 1" in job.text and "filled again" not in job.text


def test_sigterm_ends_the_job_with_a_checkpoint(cluster: Any, tmp_path: Path) -> None:
    """SIGTERM to the driver: exit code 75, a checkpoint, no process left;
    the same command with resume=auto ends the fit.
    """
    with started(tmp_path) as job:
        job.wait_for_step(3)
        pids = job.pids().values()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 75, job.text
        assert not any(is_alive(pid) for pid in pids)
    assert (
        "all workers get SIGTERM and have 25 s to end" in job.text
    )  # of 30 that Ray waits: conftest
    (last,) = {int(found) for found in re.findall(r"the run ended after step (\d+)", job.text)}
    assert (
        tmp_path / "run" / "checkpoints" / "last"
    ).resolve().name == f"epoch={last // 6}-step={last}"
    with started(tmp_path, "resume=auto", "task.pause_s=0") as again:
        assert again.end() == 0, again.text
    check_samples(again)
