"""The launcher of this process, read from each launcher's variables."""

from __future__ import annotations

import pytest

import trainkit
from trainkit.launch.environment import read_launcher

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
ENV = {
    "MASTER_ADDR": "10.0.0.1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
KUBEFLOW = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "3"}
SRUN = {
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SRUN, ("srun", 1, 2, 0, 1, "ddp")),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,2(x2)", "SLURM_NODEID": "2"},
            ("srun", 1, 2, 0, 2, "ddp"),
        ),
        # srun --pty bash
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1, "single")),
        (SRUN | TORCHRUN, ("torchrun", 1, 2, 1, 2, "ddp")),
        (HOROVOD, ("horovodrun", 3, 4, 1, 2, "horovod")),
        (TORCHRUN, ("torchrun", 1, 2, 1, 2, "ddp")),
        (MPIRUN, ("mpirun", 1, 2, 1, 2, "horovod")),
        (HYDRA, ("mpirun", 3, 4, 1, 2, "horovod")),
        (HYDRA | SRUN, ("mpirun", 3, 4, 1, 2, "horovod")),  # Hydra starts its own processes by srun
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ("srun", 1, 2, 0, 1, "ddp")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("none", 0, 1, 0, 1, "single")),
        ({}, ("none", 0, 1, 0, 1, "single")),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
            ("none", 0, 1, 0, 1, "single"),
        ),
        (HOROVOD | TORCHRUN, ("horovodrun", 3, 4, 1, 2, "horovod")),
        (ENV, ("env", 1, 2, 1, 2, "ddp")),
        (ENV | TORCHRUN, ("torchrun", 1, 2, 1, 2, "ddp")),
        (ENV | HOROVOD, ("horovodrun", 3, 4, 1, 2, "horovod")),
        (ENV | MPIRUN, ("mpirun", 1, 2, 1, 2, "horovod")),
        (ENV | HYDRA, ("mpirun", 3, 4, 1, 2, "horovod")),
        (ENV | SRUN, ("env", 1, 2, 1, 2, "ddp")),
        (KUBEFLOW, ("env", 1, 3, 0, 1, "ddp")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("none", 0, 1, 0, 1, "single")),
        ({"MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}, ("none", 0, 1, 0, 1, "single")),
        (ENV | {"RANK": "0", "WORLD_SIZE": "1"}, ("none", 0, 1, 0, 1, "single")),
    ],
)
def test_a_launcher_is_known_by_its_variables(
    env: dict[str, str], expected: tuple[object, ...]
) -> None:
    """Name, ranks and engine follow from the environment;
    a Slurm batch script alone is no launcher.
    """
    found = read_launcher(env)
    place = found.rank, found.world_size, found.local_rank, found.local_size
    assert (found.name, *place, found.engine) == expected


@pytest.mark.parametrize(
    ("env", "result"), [(HOROVOD, None), (HOROVOD | {"HOROVOD_RANK": "0"}, 5), ({}, 5)]
)
def test_rank_zero_only_runs_on_one_rank(
    env: dict[str, str], result: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decorated function runs on rank 0, at the time of the call; the other ranks get None."""

    @trainkit.rank_zero_only
    def add(a: int, *, b: int) -> int:
        return a + b

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert add(2, b=3) == result
    assert add.__name__ == "add"
    assert (
        trainkit.rank_zero_only.rank
        == trainkit.rank()
        == (0 if result else int(HOROVOD["HOROVOD_RANK"]))
    )
