"""Horovod's wheel: which builds are equal, the cache, the environment of a build,
the accepted source.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build import build as horovod_build
from trainkit.extensions.horovod_build import patches, versions
from trainkit.extensions.horovod_build import pip as horovod_pip
from trainkit.extensions.horovod_build.build import (
    build_environment,
    cached_wheel,
    store,
    wheel_key,
)
from trainkit.extensions.horovod_build.pip import fetch_source, missing_needs, verify
from trainkit.extensions.horovod_build.probe import (
    BuildPlan,
    Choice,
    InstalledTorch,
    Machine,
    Nccl,
    search_path,
)
from trainkit.extensions.horovod_build.tools import Tool
from trainkit.extensions.programs.commands import cache_folder

MACHINE = Machine(
    torch=InstalledTorch("2.15.0+cu132", "13.2", gpus=0),
    compiler=Tool("/usr/bin/c++", "c++ 12.2.0"),
    make=Tool("/usr/bin/make", "GNU Make 4.3"),
    cmake=Tool("/usr/bin/cmake", "cmake version 3.25.1"),
    mpicxx=Tool("/usr/bin/mpicxx", "g++ -lmpi"),
    nvcc=Tool("/opt/cuda/bin/nvcc", "13.0"),
    nccl=Nccl("/opt/nccl/include", "/opt/nccl/lib/libnccl.so.2"),
    platform="x86_64-avx-glibc2.36",
    cores=2,
    free_gib=8.0,
)
CPU = BuildPlan(mpi=Choice(False, ""), gpu=Choice(False, ""), jobs=2)
GPU = replace(CPU, gpu=Choice(True, ""))
MPI = replace(CPU, mpi=Choice(True, ""))


def _wheel(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
        archive.writestr("horovod-0.28.1.dist-info/RECORD", "horovod/__init__.py,,\n")
    return wheel


def test_key_differs_for_what_cannot_be_exchanged():
    """Another torch, MPI, NCCL, processor, MPI flavour or compiler flag is another wheel."""
    keys = [
        wheel_key(MACHINE, CPU, {}),
        wheel_key(replace(MACHINE, torch=InstalledTorch("2.13.0+cpu")), CPU, {}),
        wheel_key(MACHINE, MPI, {}),
        wheel_key(replace(MACHINE, mpicxx=Tool("/usr/bin/mpicxx", "g++ -lmpich")), MPI, {}),
        wheel_key(replace(MACHINE, mpirun=Tool("/usr/bin/mpirun", "Open MPI 5.0.1")), MPI, {}),
        wheel_key(MACHINE, GPU, {}),
        wheel_key(replace(MACHINE, platform="aarch64-glibc2.36"), CPU, {}),
        wheel_key(MACHINE, CPU, {"CXXFLAGS": "-g0"}),
    ]
    assert len(set(keys)) == len(keys)


def test_key_is_the_same_where_the_wheel_is():
    """How many compilers build at once,
    how much memory is free and which CMake is used make no other wheel.
    """
    other = replace(MACHINE, cores=64, free_gib=1.0, cmake=None)
    assert wheel_key(other, replace(CPU, jobs=1), {}) == wheel_key(MACHINE, CPU, {})


def test_key_follows_the_edits(monkeypatch: pytest.MonkeyPatch):
    """A wheel that was built with other edits is another wheel."""
    before = wheel_key(MACHINE, CPU, {})
    monkeypatch.setattr(versions, "version", lambda: "0.28.1+trainkit.e00000000")
    assert wheel_key(MACHINE, CPU, {}) != before


def test_key_can_be_read_and_is_one_folder():
    """The key names Horovod, Python, torch and the options in words,
    without a character that paths give a meaning.
    """
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
    key = wheel_key(replace(MACHINE, platform="x86_64/-mavx -mfma"), GPU, {})
    assert key.startswith(
        f"horovod-{patches.version()}.torch2.15.0.cu132.nccl.cuda13.0-{python}-x86_64_-mavx_-mfma-"
    )
    assert Path(key).name == key


def test_cache_folder_follows_the_environment(tmp_path: Path):
    """TRAINKIT_CACHE comes first, then XDG_CACHE_HOME, then the home folder."""
    both = {"TRAINKIT_CACHE": str(tmp_path / "a"), "XDG_CACHE_HOME": str(tmp_path / "b")}
    assert cache_folder(both) == tmp_path / "a"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "b")}) == tmp_path / "b" / "trainkit"
    assert cache_folder({}) == Path.home() / ".cache" / "trainkit"


def test_stored_wheel_is_found_again(tmp_path: Path):
    """A stored wheel is found, and no other file is left beside it."""
    stored = store(_wheel(tmp_path / "built"), tmp_path / "cache")
    assert cached_wheel(tmp_path / "cache") == stored
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [stored.name]


def test_cache_without_wheel_has_none(tmp_path: Path):
    """A missing or empty folder has no wheel, and the search creates none."""
    assert cached_wheel(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_wheel_is_not_used(tmp_path: Path, damage: str):
    """A wheel that was cut short, changed or emptied is ignored."""
    wheel = _wheel(tmp_path)
    whole = wheel.read_bytes()
    middle = whole.index(b"horovod/__init__.py") + 25
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    wheel.write_bytes({"cut": whole[: len(whole) // 2], "flipped": flipped, "empty": b""}[damage])
    assert cached_wheel(tmp_path) is None


def test_store_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the last step of storing fails, the cache has neither the wheel nor a part of it."""
    built = _wheel(tmp_path / "built")

    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(built, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_part_of_a_killed_store_is_not_taken_for_a_wheel(tmp_path: Path):
    """A temporary file left by a killed process is not used."""
    wheel = _wheel(tmp_path)
    wheel.rename(tmp_path / f".{wheel.name}.123.part")
    assert cached_wheel(tmp_path) is None


def test_settings_of_the_user_do_not_change_the_build(tmp_path: Path):
    """Variables that turn parts of Horovod on or off are ignored,
    so that the wheel's key is right.
    """
    user = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_WITH_MPI": "1",
        "CUDA_HOME": "/opt/cuda",
        "CCL_ROOT": "/opt/ccl",
    }
    env = build_environment(
        MACHINE, CPU, tmp_path, user | {"HOME": "/home/me", "HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}
    )
    assert not set(user) & set(env)
    assert env["HOROVOD_WITHOUT_MPI"] == env["HOROVOD_WITH_GLOO"] == "1"
    assert env["TMPDIR"] == str(tmp_path)
    assert (env["HOME"], env["HOROVOD_BUILD_ARCH_FLAGS"]) == ("/home/me", "-mavx")
    assert horovod_build.ignored_settings(user) == ["HOROVOD_GPU_OPERATIONS", "HOROVOD_WITH_MPI"]


def test_gpu_build_sees_toolkit_and_nccl(tmp_path: Path):
    """A build with NCCL has the toolkit first on its PATH,
    and the library under the name that the linker expects.
    """
    env = build_environment(MACHINE, GPU, tmp_path, {"PATH": "/usr/bin", "CUDA_HOME": "/elsewhere"})
    assert env["PATH"].startswith("/opt/cuda/bin:")
    assert (env["CUDA_HOME"], env["HOROVOD_GPU_OPERATIONS"]) == ("/opt/cuda", "NCCL")
    assert os.readlink(Path(env["HOROVOD_NCCL_LIB"]) / "libnccl.so") == "/opt/nccl/lib/libnccl.so.2"
    assert "PYTHONPATH" not in env


def test_cpu_build_knows_of_no_cuda_toolkit(tmp_path: Path):
    """In the build, torch.utils.cpp_extension has no CUDA_HOME;
    the user's own sitecustomize still runs.
    """
    package = tmp_path / "path" / "torch" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "cpp_extension.py").write_text("CUDA_HOME = ROCM_HOME = '/opt/found'\n")
    (tmp_path / "path" / "sitecustomize.py").write_text("print('mine too')\n")
    ask = [
        sys.executable,
        "-c",
        "from torch.utils.cpp_extension import CUDA_HOME, ROCM_HOME; print(CUDA_HOME, ROCM_HOME)",
    ]
    user = {"PYTHONPATH": str(tmp_path / "path")}
    env = build_environment(MACHINE, CPU, tmp_path, user)
    assert subprocess.check_output(ask, env=user, text=True).split("\n")[:2] == [
        "mine too",
        "/opt/found /opt/found",
    ]
    assert subprocess.check_output(ask, env=env, text=True).split("\n")[:2] == [
        "mine too",
        "None None",
    ]


@pytest.mark.skipif(
    shutil.which("c++", path=search_path(os.environ)) is None, reason="c++ is not installed"
)
def test_names_that_compilers_no_longer_include_are_there(tmp_path: Path):
    """Gloo and Horovod use them without their headers, which GCC 13 and GCC 16 stopped including
    with others; the user's own flags stay.
    """
    source = tmp_path / "uses.cc"
    source.write_text('uint8_t a = A; std::string b; std::runtime_error c("");')
    env = build_environment(MACHINE, CPU, tmp_path, {"CXXFLAGS": "-DA=3", **os.environ})
    subprocess.run(
        ["c++", "-fsyntax-only", *env["CXXFLAGS"].split(), str(source)], env=env, check=True
    )


@pytest.mark.skipif(
    shutil.which("cmake", path=search_path(os.environ)) is None, reason="CMake is not installed"
)
def test_toolchain_raises_the_standard_of_horovod_alone(tmp_path: Path):
    """CMake builds Horovod's library as C++20 though its project sets 14, stripped,
    and leaves other projects alone.
    """
    project = """\
        cmake_minimum_required(VERSION 3.21)
        project(horovod LANGUAGES NONE)
        set(CMAKE_CXX_STANDARD 14)
        add_custom_target(pytorch)
        set_target_properties(pytorch PROPERTIES CXX_STANDARD 14)
        function(show)
          get_target_property(standard pytorch CXX_STANDARD)
          get_target_property(options pytorch LINK_OPTIONS)
          message(STATUS "standard ${standard} ${options}")
        endfunction()
        cmake_language(DEFER CALL show)
    """
    (tmp_path / "CMakeLists.txt").write_text(project)
    env = build_environment(MACHINE, CPU, tmp_path, os.environ)

    def standard(build: str) -> str:
        command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / build)]
        out = subprocess.check_output(command, env=env, text=True, stderr=subprocess.STDOUT)
        return next(line for line in out.splitlines() if "standard" in line)

    assert standard("other") == "-- standard 14 options-NOTFOUND"
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "torch" / "CMakeLists.txt").touch()
    assert standard("horovod_build") == "-- standard 20 -s"


def test_build_reports_rising_percents_and_caches_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """make's percents, which compilers at once report out of order, only rise;
    the wheel ends in the cache.
    """
    commands: list[list[str]] = []

    def fake_run(command: list[str], *, on_line: Any, **_: Any) -> list[str]:
        commands.append(command)
        for line in (
            "  [  7%] Building",
            "  [ 30%] Building",
            "  [ 28%] Building",
            "  100%",
            "  [100%] Linking",
        ):
            on_line(line)
        _wheel(Path(command[command.index("--wheel-dir") + 1]))
        return []

    monkeypatch.setattr(horovod_build, "run", fake_run)
    monkeypatch.setattr(
        horovod_build,
        "edited_source",
        lambda archive, folder, version: folder / f"edited-{archive.name}",
    )
    percents: list[int] = []
    wheel = horovod_build.build_wheel(
        MACHINE,
        CPU,
        source=tmp_path / "horovod-0.28.1.tar.gz",
        cache=tmp_path,
        log=tmp_path / "log",
        environ={},
        on_percent=percents.append,
    )
    assert percents == [7, 30, 100]
    assert wheel.parent == tmp_path / "wheels" / wheel_key(MACHINE, CPU, {})
    assert {"--no-build-isolation", "--no-deps", "--no-cache-dir"} <= set(commands[0])
    assert Path(commands[0][-3]).name == "edited-horovod-0.28.1.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        assert "horovod-0.28.1.dist-info/sboms/horovod.cdx.json" in archive.namelist()


def _hostile_sdist(folder: Path) -> tuple[Path, Path]:
    """Return an sdist named as Horovod's,
    and the file that its setup.py would make if it were ever run.
    """
    folder.mkdir(parents=True)
    marker, source = folder / "was-run", folder / "horovod-0.28.1.tar.gz"
    files = {
        "setup.py": (
            f"open({str(marker)!r}, 'w')\nfrom setuptools import setup\nsetup(name='horovod')\n"
        ),
        "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
    }
    with tarfile.open(source, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return source, marker


def test_other_file_on_disk_is_refused(tmp_path: Path):
    """A source with another SHA-256 is refused, and both hashes are named."""
    source, _ = _hostile_sdist(tmp_path / "disk")
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    with pytest.raises(
        EngineError, match=f"none of it was run(.*\n)*.*{found}(.*\n)*.*{horovod_pip.SHA256}"
    ):
        verify(source)


def test_missing_file_is_a_wrong_argument(tmp_path: Path):
    """A missing --source is reported, with the file name to give."""
    with pytest.raises(ConfigError, match=r"which does not exist.*horovod-0\.28\.1\.tar\.gz"):
        verify(tmp_path / "horovod.tar.gz")


def test_other_file_of_the_index_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip refuses a file from the index with another hash before it runs its setup.py."""
    source, marker = _hostile_sdist(tmp_path / "index")
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(source.parent)),
        ("CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(EngineError, match="DO NOT MATCH THE HASHES"):
        fetch_source(tmp_path, tmp_path / "log")
    assert not marker.exists()


def test_what_is_here_is_not_asked_of_pip():
    """Packages that are installed and a CMake that is new
    enough are not missing; the others are.
    """
    assert missing_needs(("pytest", "cmake>=3.21"), MACHINE) == []
    assert missing_needs(("pytest>=9999", "no-such-package"), MACHINE) == [
        "pytest>=9999",
        "no-such-package",
    ]
    for cmake in (None, Tool("/usr/bin/cmake", "cmake version 3.18.4")):
        assert missing_needs(("cmake>=3.21",), replace(MACHINE, cmake=cmake)) == ["cmake>=3.21"]
