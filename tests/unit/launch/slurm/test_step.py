"""Slurm's variables, read as ranks; no Slurm is needed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainkit.engine.ddp.start import assign_ranks
from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import is_launched_rank, read_launcher
from trainkit.launch.slurm.nodes import expand_hosts, expand_tasks
from trainkit.launch.slurm.step import note_requeue, this_step

TASK = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "localhost,gpu[08-09]",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("a-b,c[098-101]", ["a-b", "c098", "c099", "c100", "c101"]),
    ],
)
def test_host_lists_are_expanded(text: str, names: list[str]) -> None:
    """In Slurm's order, with the zeros of the numbers."""
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("8(x2)", [8, 8]), ("4,4,2", [4, 4, 2])],
)
def test_tasks_of_nodes_are_expanded(text: str, tasks: list[int]) -> None:
    """Equal neighbours are written once by Slurm."""
    assert expand_tasks(text) == tasks


def test_a_task_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddp takes its numbers from Slurm's, and sets what torch reads."""
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that they are removed at the end
    ranks = Ranks(read_launcher())
    assign_ranks(ranks, read_launcher(), "ddp")
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_size) == (3, 5, 1, 2)
    assert this_step().torch_variables()["MASTER_ADDR"] == "localhost"
    assert read_launcher().name == "env"  # the same numbers, by torch's variables


def test_all_tasks_know_the_same_address() -> None:
    """It follows from the job and the step, unless it was set before srun."""
    step = this_step(TASK)
    assert (step.address, step.port) == (this_step(TASK | {"SLURM_PROCID": "0"}).address, 20492)
    assert this_step(TASK | {"SLURM_STEP_ID": "3"}).port != step.port
    chosen = this_step(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (chosen.address, chosen.port) == ("10.0.0.1", 29500)


def test_a_port_that_is_taken_is_named() -> None:
    """By rank 0, before any rank waits for it."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        with pytest.raises(
            EngineError, match=rf"Port {port} of localhost.*in use.*export MASTER_PORT"
        ):
            this_step(TASK | {"MASTER_PORT": port, "SLURM_PROCID": "0"}).torch_variables()
        this_step(TASK | {"MASTER_PORT": port}).torch_variables()  # rank 3 connects to it


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_NODEID": "3"},
        {"SLURM_STEP_TASKS_PER_NODE": "2"},
        {"SLURM_PROCID": "x"},
        {"SLURM_STEP_NODELIST": "a"},
    ],
)
def test_variables_that_do_not_fit_are_refused(wrong: dict[str, str]) -> None:
    """A wrapper that passes on a part of them, or those of another step."""
    with pytest.raises(EngineError, match="its variables do not describe the other ranks"):
        this_step(TASK | wrong)


def test_a_node_without_an_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name service nor Slurm knows it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        EngineError, match=r"Node nowhere\.invalid is this Slurm job's first.*export MASTER_ADDR"
    ):
        this_step(TASK | {"SLURM_STEP_NODELIST": "nowhere.invalid,gpu[08-09]"})


def test_a_checkpoint_after_a_signal_is_noted_for_the_script(tmp_path: Path) -> None:
    """By rank 0 alone; without a script the exit code says it."""
    environ = {"TRAINKIT_SLURM_REQUEUE": str(tmp_path / "requeue")}
    assert note_requeue(75, False, environ) == 0 and not (tmp_path / "requeue").exists()
    assert note_requeue(75, True, environ) == 0 and (tmp_path / "requeue").exists()
    assert note_requeue(75, True, {}) == 75


def test_a_shell_in_the_job_is_no_rank() -> None:
    """The script's variable counts in a step alone."""
    assert is_launched_rank(TASK | {"TRAINKIT_LAUNCHER": "slurm"})
    assert not is_launched_rank({"TRAINKIT_LAUNCHER": "slurm"}) and not is_launched_rank(TASK)
