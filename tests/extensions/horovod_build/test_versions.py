"""The version of a built Horovod says what it was built for and with,
in words that pip does not change.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from tests.extensions.horovod_build.test_build import CPU, GPU, MACHINE, MPI
from trainkit.extensions.horovod_build.patches import identity
from trainkit.extensions.horovod_build.probe import BuildPlan, Choice, InstalledTorch, Machine
from trainkit.extensions.horovod_build.tools import Tool
from trainkit.extensions.horovod_build.versions import Build, build_of, build_version, mpi_name

OPEN_MPI = replace(MACHINE, mpirun=Tool("/usr/bin/mpirun", "Open MPI 4.1.4"))
BOTH = replace(GPU, mpi=Choice(True, ""))


@pytest.mark.parametrize(
    ("machine", "plan", "torch", "mpi", "cuda"),
    [
        (MACHINE, CPU, "2.15.0.cu132", None, None),
        (OPEN_MPI, MPI, "2.15.0.cu132", "openmpi4.1.4", None),
        (
            replace(MACHINE, mpirun=Tool("/opt/mpirun", "MPICH 4.0.2")),
            MPI,
            "2.15.0.cu132",
            "mpich4.0.2",
            None,
        ),
        (MACHINE, GPU, "2.15.0.cu132", None, "13.0"),
        (OPEN_MPI, BOTH, "2.15.0.cu132", "openmpi4.1.4", "13.0"),
        (
            replace(MACHINE, torch=InstalledTorch("2.16.0.dev20261101+cpu")),
            CPU,
            "2.16.0.dev20261101.cpu",
            None,
            None,
        ),
        (
            replace(MACHINE, torch=InstalledTorch("2.11.0a0+git1A-2")),
            CPU,
            "2.11.0a0.git1a.2",
            None,
            None,
        ),
    ],
)
def test_a_version_holds_what_a_build_needs(
    machine: Machine, plan: BuildPlan, torch: str, mpi: str | None, cuda: str | None
):
    """Edits, torch, MPI and CUDA are read back as they were written,
    and pip's own form of the version is the same.
    """
    version = build_version(machine, plan)
    assert str(Version(version)) == version
    assert build_of(version) == Build(identity(), torch, mpi, cuda)


@pytest.mark.parametrize("version", ["0.28.1", "0.28.1+cpu", "0.28.1+trainkit.e12345678"])
def test_other_versions_say_nothing(version: str):
    """A stock Horovod, and one of a trainkit whose versions ended with the edits,
    are not taken for a build.
    """
    assert build_of(version) is None


def test_an_mpi_of_a_vendor_has_no_numbers():
    """The numbers of an unknown mpirun are those of something else."""
    assert mpi_name(Tool("/opt/mpirun", "Intel(R) MPI Library 2021.11")) == "mpi"
