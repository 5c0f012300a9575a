"""Detects the launcher of this process: the only reader of the launchers' environment variables.
Imports no torch.

horovodrun and `trainkit launch` set HOROVOD_RANK, HOROVOD_SIZE, ...; torchrun RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID,
...; mpirun OMPI_COMM_WORLD_* (Open MPI) or PMI_* and MPI_LOCAL* (MPICH, Intel MPI); srun SLURM_*.
Ray Train, Kubeflow and scripts set torch's own ("env"): MASTER_ADDR, RANK and WORLD_SIZE, all
three, or they do not count. A process without launcher has none of them and is rank 0 of 1. Ranks
of launcher=ray have horovodrun's. What else Slurm sets is read in launch/slurm/step.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, ParamSpec, TypeVar

from trainkit.launch.slurm.nodes import expand_tasks

_P = ParamSpec("_P")
_T = TypeVar("_T")
# in the environment of ranks that `python -m trainkit launch` started
LAUNCHED = "TRAINKIT_LAUNCHED"
LauncherName = Literal["none", "launch", "horovodrun", "torchrun", "mpirun", "env", "srun"]


@dataclass(frozen=True)
class Launcher:
    """The launcher, by the environment, and this process's rank."""

    name: LauncherName
    rank: int  # rank of this process, from 0
    world_size: int  # number of processes
    local_rank: int  # rank among the processes of its host, from 0
    local_size: int  # number of processes on this host

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    @property
    def engine(self) -> Literal["single", "horovod", "ddp"]:
        """The engine selected by `engine=auto`."""
        if self.name in ("horovodrun", "mpirun"):
            return "horovod"
        return "ddp" if self.name in ("launch", "torchrun", "env", "srun") else "single"


class _Variables(NamedTuple):
    """The names of a launcher's variables:
    the one that identifies it, and those of a process's place.
    """

    launcher: LauncherName
    sign: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# Most reliable first.
LAUNCHERS = (
    # `python -m trainkit launch`: its driver is that of an elastic horovodrun.
    _Variables(
        "launch",
        LAUNCHED,
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    _Variables(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    _Variables(
        "torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    _Variables(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI: Hydra's. srun sets PMI_RANK and PMI_SIZE too, also for tasks that are no
    # ranks of MPI.
    _Variables(
        "mpirun", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    # Before srun's: a cluster of Ray that srun started leaves its variables to the workers.
    _Variables("env", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # SLURM_STEP_ID alone is also set in a batch script, which is a single task.
    _Variables(
        "srun",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "",
    ),
)
_NAMES = frozenset(name for variables in LAUNCHERS for name in variables[1:])


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without launcher variables, for a separate job."""
    return {name: value for name, value in environ.items() if name not in _NAMES}


def read_launcher(environ: Mapping[str, str] | None = None) -> Launcher:
    """Read the launcher from environment variables (default: `os.environ`)."""
    env = os.environ if environ is None else environ

    def number(variable: str, default: int) -> int:
        text = env.get(variable, "")
        return int(text) if text.lstrip("-").isdigit() else default

    for name, sign, rank, size, local_rank, local_size in LAUNCHERS:
        if sign not in env or number(size, 1) < 1:
            continue
        world = number(size, 1)
        if name == "srun":
            if world == 1:
                continue  # also a shell (srun --pty bash), in which any launcher may be started
            nodes, node = expand_tasks(env[sign]), number("SLURM_NODEID", 0)
            return Launcher(
                name,
                number(rank, 0),
                world,
                number(local_rank, 0),
                nodes[node] if node < len(nodes) else world,
            )
        if name == "env":
            if world == 1 or number(rank, -1) < 0:
                continue  # a single run, or variables that were left over
            if local_rank not in env:  # Kubeflow: one process on each host
                return Launcher(name, number(rank, 0), world, 0, 1)
        return Launcher(
            name, number(rank, 0), world, number(local_rank, 0), number(local_size, world)
        )
    return Launcher("none", 0, 1, 0, 1)


def is_rank_of_ray() -> bool:
    """Return whether launcher=ray started this process as a rank."""
    return os.environ.get("TRAINKIT_LAUNCHER") == "ray"


def is_launched_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a config's launcher started this process as
    a rank (default: by `os.environ`).
    """
    env = os.environ if environ is None else environ
    name = env.get("TRAINKIT_LAUNCHER", "")
    # Slurm's batch script has the variable too; the tasks of its srun are the ranks.
    return "SLURM_STEP_TASKS_PER_NODE" in env if name == "slurm" else bool(name)


def own_gpu() -> int | None:
    """Return the index of this rank's GPU if its launcher shows each rank its own GPUs alone;
    None: all of the host's.
    """
    text = os.environ.get("TRAINKIT_GPU", "")
    return int(text) if text.isdecimal() else None


class _RankZeroOnly:
    """Decorator: run a function on rank 0 only; the other ranks get None.
    For files and prints, never around a collective.
    """

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        @functools.wraps(function)
        def on_rank_zero(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            return function(*args, **kwargs) if rank() == 0 else None

        return on_rank_zero

    @property
    def rank(self) -> int:
        """This process's rank, as Lightning's decorator has it."""
        return rank()


rank_zero_only = _RankZeroOnly()


def job_started() -> str:
    """Return the start time of this process's elastic job, as set by its launcher;
    "" outside of one.
    """
    return os.environ.get("TRAINKIT_JOB_STARTED", "")


def driver_address() -> str:
    """Return address:port of this process's elastic driver; "" outside of an elastic job."""
    address, port = (
        os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT")
    )
    return f"{address}:{port}" if job_started() and address and port else ""


def rank() -> int:
    """Return the rank of this process, from 0; in a loader worker, that of its parent."""
    return read_launcher().rank


def world_size() -> int:
    """Return the number of ranks of the job: 1 without a launcher."""
    return read_launcher().world_size
