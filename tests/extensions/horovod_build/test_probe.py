"""The choice of Horovod's parts, from the machine's tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build import probe as horovod_machine
from trainkit.extensions.horovod_build.probe import (
    Choice,
    InstalledTorch,
    Machine,
    Nccl,
    Wanted,
    choose,
    probe,
    require_compilers,
)
from trainkit.extensions.horovod_build.tools import Tool, find_mpirun, has_mpi_header

PLAIN = Machine(
    torch=InstalledTorch("2.15.0+cpu"),
    compiler=Tool("/usr/bin/c++", "c++ 12.2.0"),
    make=Tool("/usr/bin/make", "GNU Make 4.3"),
    cmake=Tool("/usr/bin/cmake", "cmake version 3.25.1"),
    mpicxx=None,
    nvcc=None,
    nccl=None,
    platform="x86_64-avx-glibc2.36",
    cores=2,
    free_gib=8.0,
)
WITH_GPU = replace(
    PLAIN,
    torch=InstalledTorch("2.15.0+cu132", "13.2", gpus=2),
    nvcc=Tool("/opt/cuda/bin/nvcc", "13.0"),
    nccl=Nccl("/opt/nccl/include", "/opt/nccl/lib/libnccl.so.2"),
)
OPEN_MPI = Tool("/usr/bin/mpirun", "Open MPI 4.1.4")
WITH_MPI = replace(PLAIN, mpicxx=Tool("/usr/bin/mpicxx", "g++ -lmpi_cxx -lmpi"), mpirun=OPEN_MPI)


def test_plain_machine_builds_gloo_alone_and_says_why():
    """Without MPI and GPU neither is built, and each has its reason."""
    plan = choose(PLAIN, Wanted())
    assert (plan.mpi.on, plan.gpu.on) == (False, False)
    assert plan.mpi.why == "--mpi: for mpirun and Adasum"
    assert "torch sees no GPU" in plan.gpu.why


def test_an_mpi_that_is_there_is_built_on_request_only():
    """Without --mpi it is named and left out: horovodrun would use mpirun by itself.
    With --mpi it is named with its paths.
    """
    assert choose(WITH_MPI, Wanted()).mpi == Choice(
        False, "--mpi builds with Open MPI 4.1.4, which is here"
    )
    assert choose(WITH_MPI, Wanted(mpi=True)).mpi == Choice(
        True, "Open MPI 4.1.4: /usr/bin/mpicxx, /usr/bin/mpirun"
    )


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (
            {"mpicxx": None},
            (
                r"mpicxx, MPI's compiler, is not on the PATH.*apt-get install libopenmpi-dev"
                r" openmpi-bin"
            ),
        ),
        (
            {"mpi_header": False},
            r"/usr/bin/mpicxx and .*, but not mpi.h: .*apt-get install libopenmpi-dev;",
        ),
        (
            {"mpirun": None},
            (
                r"/usr/bin/mpicxx was found, but not mpirun.*apt-get install libopenmpi-dev"
                r" openmpi-bin"
            ),
        ),
        (
            {"mpirun": Tool("/opt/mpirun", "MPICH 4.0.2")},
            r"mpicxx is Open MPI's and /opt/mpirun is MPICH's",
        ),
        (
            {"mpicxx": Tool("/opt/mpicxx", "c++ -lmpichcxx -lmpich")},
            r"/opt/mpicxx is MPICH's and .* is Open MPI's",
        ),
    ],
)
def test_mpi_asked_for_that_cannot_be_built_is_refused_with_the_cure(
    lack: dict[str, Any], words: str
):
    """--mpi without mpicxx, without mpirun or with those of two MPIs ends before the build."""
    with pytest.raises(ConfigError, match=f"--mpi is given.*{words}"):
        choose(replace(WITH_MPI, **lack), Wanted(mpi=True))


@pytest.mark.parametrize(
    ("script", "there"),
    [
        (
            (
                "cat >/dev/null; echo '<stdin>:1:10: fatal error: mpi.h: No such file or directory'"
                " >&2; exit 1"
            ),
            False,
        ),
        ("cat >/dev/null; echo 'g++: command not found' >&2; exit 127", True),
        ("cat", True),
    ],
    ids=["no header", "no compiler", "header"],
)
def test_mpis_header_is_looked_for_with_its_compiler(script: str, there: bool, tmp_path: Path):
    """Debian's openmpi-bin brings mpicxx, and libopenmpi-dev the headers;
    without a compiler at all that is said elsewhere.
    """
    mpicxx = tmp_path / "mpicxx"
    mpicxx.write_text(f"#!/bin/sh\n{script}\n")
    mpicxx.chmod(0o755)
    assert has_mpi_header(Tool(str(mpicxx), "g++ -lmpi")) is there


@pytest.mark.parametrize(
    ("prints", "version"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 4.0.2", "MPICH 4.0.2"),
        ("mpirun of a vendor", "mpirun of a vendor"),
        ("", "unknown version"),
    ],
)
def test_mpirun_says_which_mpi_it_is(prints: str, version: str, tmp_path: Path):
    """Open MPI, MPICH with its version on the second line, and another, by its own words."""
    program = _program(tmp_path / "mpirun", prints)
    assert find_mpirun(str(tmp_path)) == Tool(str(program), version)


def test_seen_gpu_is_built_for_unless_left_out():
    """A GPU that torch sees, nvcc and NCCL turn NCCL on; --cpu turns it off again."""
    assert choose(WITH_GPU, Wanted()).gpu.on
    assert choose(WITH_GPU, Wanted(gpu=False)).gpu.why == "left out by --cpu"


def test_gpu_can_be_built_for_where_none_is_seen():
    """--gpu builds on a login node without a GPU; by itself that machine builds for the CPU."""
    login_node = replace(WITH_GPU, torch=InstalledTorch("2.15.0+cu132", "13.2", gpus=0))
    assert choose(login_node, Wanted(gpu=True)).gpu.on
    assert not choose(login_node, Wanted()).gpu.on


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        ({"torch": InstalledTorch("2.15.0+cpu", None, gpus=1)}, "built without CUDA"),
        ({"nvcc": None}, "nvcc, the compiler of CUDA, was not found"),
        (
            {"nvcc": Tool("/opt/cuda/bin/nvcc", "12.4")},
            r"nvcc is of CUDA 12\.4 and torch of CUDA 13\.2",
        ),
        ({"nccl": None}, "pip install nvidia-nccl-cu13"),
    ],
)
def test_lack_for_gpu_is_a_reason_or_a_refusal(lack: dict[str, Any], reason: str):
    """The part missing for NCCL is the reason for a CPU build, and refuses --gpu."""
    machine = replace(WITH_GPU, **lack)
    assert not choose(machine, Wanted()).gpu.on
    with pytest.raises(ConfigError, match=f"--gpu is given.*{reason}"):
        choose(machine, Wanted(gpu=True))


def test_lack_of_nvcc_is_reported_where_a_gpu_is_seen():
    """On a machine with a GPU the plan names what prevents NCCL."""
    assert (
        "this build trains on the CPU alone"
        in choose(replace(WITH_GPU, nvcc=None), Wanted()).gpu.why
    )


def test_missing_torch_is_refused():
    """Without torch there is nothing to build for."""
    with pytest.raises(EngineError, match="pip install torch"):
        choose(replace(PLAIN, torch=None), Wanted())


@pytest.mark.parametrize(
    ("cores", "free_gib", "asked", "jobs"),
    [(2, 8.0, None, 2), (64, 7.9, None, 7), (4, 0.3, None, 1), (4, 0.3, 3, 3)],
)
def test_compilers_at_once_fit_cores_and_memory(
    cores: int, free_gib: float, asked: int | None, jobs: int
):
    """One compiler per core and per GiB, at least one; --jobs overrides."""
    assert choose(replace(PLAIN, cores=cores, free_gib=free_gib), Wanted(jobs=asked)).jobs == jobs


def test_missing_compiler_is_refused_with_the_command():
    """Without a C++ compiler or make nothing is started,
    and the message says how to install them.
    """
    with pytest.raises(
        EngineError, match=r"no C\+\+ compiler was found.*apt-get install g\+\+ make"
    ):
        require_compilers(replace(PLAIN, compiler=None), {})
    with pytest.raises(EngineError, match=r"CXX is 'g\+\+-99', which is not found"):
        require_compilers(replace(PLAIN, compiler=None), {"CXX": "g++-99"})
    with pytest.raises(EngineError, match=r"make was not found.*apt-get install g\+\+ make"):
        require_compilers(replace(PLAIN, make=None), {})


def _program(path: Path, prints: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not import torch (2 s), and search NCCL nowhere in this environment."""
    monkeypatch.setattr(horovod_machine, "_ask_torch", lambda: None)
    monkeypatch.setattr(horovod_machine.sys, "path", [])


@pytest.mark.usefixtures("bare_probe")
def test_nvcc_is_that_of_a_whole_toolkit(tmp_path: Path):
    """An nvcc without headers, such as a script on the PATH,
    is skipped for a toolkit that has them.
    """
    script = _program(tmp_path / "script" / "bin" / "nvcc", "release 11.0")
    toolkit = tmp_path / "cuda"
    nvcc = _program(toolkit / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime.h").touch()
    tool = probe({"CUDA_HOME": str(script.parents[1]), "CUDA_PATH": str(toolkit)}).nvcc
    assert tool == Tool(str(nvcc), "13.0")


@pytest.mark.usefixtures("bare_probe")
def test_nccl_of_the_package_index_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The PyPI package has only libnccl.so.2,
    without the name that the linker expects; it is accepted.
    """
    home = tmp_path / "nvidia" / "nccl"
    for folder, name in (("include", "nccl.h"), ("lib", "libnccl.so.2")):
        (home / folder).mkdir(parents=True)
        (home / folder / name).touch()
    monkeypatch.setattr(horovod_machine.sys, "path", [str(tmp_path)])
    assert probe({}).nccl == Nccl(str(home / "include"), str(home / "lib" / "libnccl.so.2"))


@pytest.mark.usefixtures("bare_probe")
def test_named_compiler_is_the_one_that_is_found(tmp_path: Path):
    """CXX decides, also after a launcher; a missing compiler is not silently replaced."""
    _program(tmp_path / "mycxx", "mycxx 1.0")
    assert probe({"PATH": str(tmp_path), "CXX": "ccache mycxx"}).compiler == Tool(
        str(tmp_path / "mycxx"), "mycxx 1.0"
    )
    assert probe({"CXX": "g++-99"}).compiler is None
