"""A wheelhouse: a folder, or a page of links, with wheels of Horovod that were built elsewhere. pip
reads and installs them.

select                   the version that this machine needs, of those that pip finds there
`- offered               those that pip finds for this Python
install
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build.patches import identity
from trainkit.extensions.horovod_build.pip import pip
from trainkit.extensions.horovod_build.probe import Machine
from trainkit.extensions.horovod_build.versions import build_of, mpi_name, torch_name
from trainkit.extensions.programs.commands import run

_MOST_SHOWN = 6
_WIDEST = 240
_EXPERIMENTAL = "pip index is currently an experimental command"


def select(place: str, machine: Machine, *, mpi: bool, gpu: bool | None) -> str:
    """Return the version of Horovod to take from a wheelhouse.

    Args:
        place: a folder or a URL.
        mpi: take a build with the MPI of this machine's mpirun; else one without.
        gpu: take a build with NCCL (True), one without (False), or one with it where torch sees a
            GPU and there is one (None).

    Raises:
        ConfigError: the folder does not exist, or there is no mpirun to fit.
        EngineError: the wheelhouse has no such wheel; the message has what it has, and the command
            that makes one.
    """
    assert machine.torch is not None
    versions, warnings = offered(place)
    needs = _mpi(machine) if mpi else None
    fit = {
        version: build
        for version in versions
        if (build := build_of(version)) is not None
        and (build.edits, build.torch) == (identity(), torch_name(machine.torch.version))
        and _same_mpi(build.mpi, needs)
    }
    tried = (True, False) if gpu is None and machine.torch.gpus else (bool(gpu),)
    for with_nccl in tried:
        fitting = [
            version for version, build in fit.items() if (build.cuda is not None) == with_nccl
        ]
        if fitting:
            return max(fitting, key=lambda version: fit[version].mpi == needs)
    raise EngineError(_missing(place, machine, versions, warnings, needs, gpu))


def offered(place: str) -> tuple[list[str], list[str]]:
    """Return the versions of Horovod that pip finds in a wheelhouse for this Python, and its
    warnings.

    Raises:
        ConfigError: the folder does not exist.
    """
    if "://" not in place and not Path(place).is_dir():
        raise ConfigError(
            f"--wheelhouse is '{place}', which is no folder. Give the folder of the wheels, or its"
            " URL (https://...)."
        )
    command = pip(
        "index", "versions", "horovod", "--no-index", "--find-links", place, "--retries", "1"
    )
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", timeout=300
    )
    head = "Available versions:"
    lines = [line.partition(head)[2] for line in done.stdout.splitlines() if line.startswith(head)]
    warnings = [
        line.removeprefix("WARNING: ")
        for line in done.stderr.splitlines()
        if line.startswith("WARNING: ")
    ]
    return [version.strip() for line in lines for version in line.split(",")], [
        w for w in warnings if _EXPERIMENTAL not in w
    ]


def install(place: str, version: str, log: Path) -> None:
    """Install a version from a wheelhouse, replacing any installed Horovod."""
    options = ["--no-deps", "--force-reinstall", "--no-index", "--find-links", place]
    run(
        pip("install", *options, f"horovod=={version}"),
        what=f"Installing Horovod {version} from {place}",
        log=log,
    )


def _mpi(machine: Machine) -> str:
    if machine.mpirun is None:
        raise ConfigError(
            "--mpi is given, but there is no mpirun on the PATH. Install the MPI of the wheel, or"
            " leave --mpi out."
        )
    return mpi_name(machine.mpirun)


def _same_mpi(built: str | None, here: str | None) -> bool:
    """Return whether a build fits this machine's MPI: the same one, of the same major version."""
    return (built and built.partition(".")[0]) == (here and here.partition(".")[0])


def _missing(
    place: str,
    machine: Machine,
    versions: list[str],
    warnings: list[str],
    mpi: str | None,
    gpu: bool | None,
) -> str:
    assert machine.torch is not None
    parts = (
        f"torch {machine.torch.version}{f', {mpi}' if mpi else ''}{', NCCL' if gpu else ''},"
        f" trainkit's edits {identity()}"
    )
    files = (
        sorted(path.name for path in Path(place).glob("horovod-*.whl"))
        if "://" not in place
        else []
    )
    here = versions or files
    if here:
        shown = "\n".join(f"  {name}" for name in here[:_MOST_SHOWN]) + (
            "\n  ..." if len(here) > _MOST_SHOWN else ""
        )
        has = (
            f"for this Python it has:\n{shown}"
            if versions
            else f"its wheels are for other Pythons or processors:\n{shown}"
        )
    else:
        has = f"pip found none there{f': {warnings[-1][:_WIDEST]}' if warnings else '.'}"
    options = f"{' --mpi' if mpi else ''}{' --gpu' if gpu else ''}"
    return (
        f"The wheelhouse {place} has no Horovod for {parts}; {has}\nMake it where a compiler is:"
        f" python -m trainkit horovod wheel{options} --torch {machine.torch.version} --out DIR"
    )
