"""The launcher of this process, read from each launcher's variables."""

from __future__ import annotations

import pytest

from trainkit.launch.environment import read_launcher

HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (HOROVOD, ("horovodrun", 3, 4, 1, 2, "horovod")),
        (TORCHRUN, ("torchrun", 1, 2, 1, 2, "ddp")),
        (MPIRUN, ("mpirun", 1, 2, 1, 2, "horovod")),
        ({}, ("none", 0, 1, 0, 1, "single")),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("none", 0, 1, 0, 1, "single")),
        (HOROVOD | TORCHRUN, ("horovodrun", 3, 4, 1, 2, "horovod")),
    ],
)
def test_a_launcher_is_known_by_its_variables(env: dict[str, str], expected: tuple[object, ...]) -> None:
    """Name, ranks and engine follow from the environment; a Slurm batch script alone is no launcher."""
    found = read_launcher(env)
    place = found.rank, found.world_size, found.local_rank, found.local_size
    assert (found.name, *place, found.engine) == expected
