"""The version of a built Horovod: the release, trainkit's edits, and what it was built for and
with.

    0.28.1+trainkit.e9934a34d.torch2.15.0.cu132                          Gloo alone
    0.28.1+trainkit.e9934a34d.torch2.15.0.cu132.openmpi4.1.4             with MPI
    0.28.1+trainkit.e9934a34d.torch2.15.0.cu132.nccl.cuda13.0            with NCCL

So wheels for several torches lie in one folder under different names, and pip takes the one that is
requested.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainkit.extensions.horovod_build.patches import version
from trainkit.extensions.horovod_build.probe import BuildPlan, Machine
from trainkit.extensions.horovod_build.tools import Tool, mpi_family

_LOCAL = re.compile(
    r"\+trainkit\.(?P<edits>e[0-9a-f]+)\.torch(?P<torch>.+?)(\.(?P<mpi>(?:openmpi|mpich|mpi)[\d.]*?))?(\.nccl\.cuda(?P<cuda>[\d.]+))?$"
)


@dataclass(frozen=True)
class Build:
    """What a Horovod was built from, for and with; None: without."""

    edits: str
    torch: str
    mpi: str | None
    cuda: str | None


def build_version(machine: Machine, plan: BuildPlan) -> str:
    """Return the version of a Horovod that is built on this machine."""
    assert machine.torch is not None
    parts = [f"torch{torch_name(machine.torch.version)}"]
    if plan.mpi.on and machine.mpirun is not None:
        parts.append(mpi_name(machine.mpirun))
    if plan.gpu.on and machine.nvcc is not None:
        parts.append(f"nccl.cuda{machine.nvcc.version}")
    return ".".join([version(), *parts])


def build_of(horovod: str) -> Build | None:
    """Return what a version says; None if trainkit did not build it,
    or did so before versions said it.
    """
    match = _LOCAL.search(horovod)
    return (
        Build(**{name: match[name] for name in ("edits", "torch", "mpi", "cuda")})
        if match
        else None
    )


def torch_name(torch: str) -> str:
    """Return torch's version as a version of Horovod holds it:
    letters, digits and dots, as pip writes local versions.
    """
    return re.sub(r"[^a-z0-9]+", ".", torch.lower())


def mpi_name(mpirun: Tool) -> str:
    """Return an MPI as a version of Horovod holds it:
    openmpi4.1.4, mpich4.0.2, or mpi for that of a vendor.
    """
    family = {"Open MPI": "openmpi", "MPICH": "mpich"}.get(mpi_family(mpirun) or "", "mpi")
    numbers = re.search(r"\d+(\.\d+)*", mpirun.version)
    return f"{family}{numbers.group() if numbers and family != 'mpi' else ''}"
