"""Horovod with MPI, for this folder's tests alone:
`make mpi` puts it beside the environment, whose own Horovod has no MPI.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mpi.jobs import BESIDE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ranks leave their files to the operating system."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.parallel)


@pytest.fixture(scope="session", autouse=True)
def mpi() -> None:
    """Skip, and say why, without Open MPI or without a Horovod that was built with it."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (apt-get install libopenmpi-dev openmpi-bin)")
    if not (BESIDE / "horovod").is_dir():
        pytest.skip(f"there is no Horovod with MPI in {BESIDE}: `make mpi` builds it")
