"""Horovod's wheel for the installed torch: the cache of wheels, and the build that fills it.

    wheel_key             identifies builds that are interchangeable
    cached_wheel, store   <cache>/wheels/<key>/: written atomically, read only if undamaged
    build_wheel           the release with trainkit's edits, pip wheel in build_environment(), the
                          bill of materials, then store

The edits do not cover the needs of the build itself: horovod.cmake, which CMake reads through
CMAKE_TOOLCHAIN_FILE, raises the C++ standard.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from trainkit.extensions.horovod_build import sbom
from trainkit.extensions.horovod_build.patches import edited_source
from trainkit.extensions.horovod_build.pip import fetch_source, pip
from trainkit.extensions.horovod_build.probe import BuildPlan, Machine, search_path
from trainkit.extensions.horovod_build.versions import build_version
from trainkit.extensions.programs.commands import run

_TOOLCHAIN = Path(__file__).with_name("horovod.cmake")
# Newer versions of GCC no longer include these implicitly: the last two since 13, the first since
# 16. For older ones nothing changes.
_HEADERS = "-include cstdint -include stdexcept -include string"
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_KEPT = ("HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST")
# the first two name a toolkit, the last one turns oneCCL on
_DROPPED = ("CUDA_HOME", "CUDA_PATH", "CCL_ROOT")

# Horovod compiles for CUDA whenever torch.utils.cpp_extension knows a toolkit, requested or not.
# For a build without CUDA, this sitecustomize.py runs in every Python of the build, and in no
# other.
_HIDE_TOOLKITS = """\
import importlib.util
import os
import sys
from importlib.machinery import PathFinder


class HideToolkits:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.utils.cpp_extension":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                module.CUDA_HOME = module.ROCM_HOME = None

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, HideToolkits)

here = os.path.dirname(os.path.abspath(__file__))
shadowed = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != here])
if shadowed is not None:
    shadowed.loader.exec_module(importlib.util.module_from_spec(shadowed))
"""


def wheel_key(machine: Machine, plan: BuildPlan, environ: Mapping[str, str]) -> str:
    """Return a readable name that differs for builds that are not interchangeable."""
    parts = [
        f"horovod-{build_version(machine, plan)}",
        f"cp{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}",
    ]
    recipe = _TOOLCHAIN.read_text(encoding="utf-8") + environ.get("CXXFLAGS", "")
    if plan.mpi.on and machine.mpicxx is not None:
        recipe += machine.mpicxx.version + (machine.mpirun.version if machine.mpirun else "")
    if plan.gpu.on:
        recipe += environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")
    parts += [machine.platform, hashlib.sha256(recipe.encode()).hexdigest()[:8]]
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", "-".join(parts))


def cached_wheel(folder: Path) -> Path | None:
    """Return the undamaged wheel in a folder of the cache, or None."""
    for wheel in sorted(folder.glob("horovod-*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if archive.testzip() is None:
                    return wheel
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError):
            continue
    return None


def store(wheel: Path, folder: Path) -> Path:
    """Copy a wheel into the cache atomically, also if two builds end at once."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{wheel.name}.{uuid.uuid4().hex}.part"
    try:
        shutil.copyfile(wheel, temporary)
        os.replace(temporary, folder / wheel.name)
    finally:
        temporary.unlink(missing_ok=True)
    return folder / wheel.name


def ignored_settings(environ: Mapping[str, str]) -> list[str]:
    """Return the user's variables that would change Horovod's build and are ignored for it."""
    ours = (
        "HOROVOD_WITH",
        "HOROVOD_GPU",
        "HOROVOD_CPU_OPERATIONS",
        "HOROVOD_NCCL_I",
        "HOROVOD_NCCL_L",
        "HOROVOD_DEBUG",
    )
    return sorted(
        name
        for name in environ
        if name.startswith(ours) or name in ("CMAKE_TOOLCHAIN_FILE", "HOROVOD_CMAKE")
    )


def build_environment(
    machine: Machine, plan: BuildPlan, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the build, based on the user's.

    Args:
        folder: a folder of the build, for files that it needs: a library link, a sitecustomize.py.
        environ: the user's environment; HOROVOD_* variables are dropped, except those for the
            processor.
    """
    env = {
        k: v
        for k, v in environ.items()
        if k in _KEPT or not (k.startswith("HOROVOD_") or k in _DROPPED)
    }
    env |= {
        "PATH": search_path(environ),
        "TMPDIR": str(folder),  # so that files of an interrupted pip are deleted with the folder
        "CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo declares CMake 2.8, which CMake 4 rejects
        "CMAKE_GENERATOR": "Unix Makefiles",  # setup.py passes arguments of make
        "MAKEFLAGS": f"-j{plan.jobs}",
        "CXXFLAGS": f"{environ.get('CXXFLAGS', '')} {_HEADERS}".strip(),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if plan.mpi.on else "HOROVOD_WITHOUT_MPI": "1",
    }
    return env | (
        _with_nccl(machine, folder, env) if plan.gpu.on else _without_toolkits(folder, env)
    )


def _with_nccl(machine: Machine, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    assert machine.nvcc is not None and machine.nccl is not None
    home = str(Path(machine.nvcc.path).parents[1])
    links = folder / "nccl"
    links.mkdir()
    (links / "libnccl.so").symlink_to(machine.nccl.library)
    return {
        "PATH": os.pathsep.join([str(Path(home) / "bin"), env["PATH"]]),
        "CUDA_HOME": home,
        "HOROVOD_CUDA_HOME": home,
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_INCLUDE": machine.nccl.include,
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",  # then Horovod uses the NCCL that torch has loaded
    }


def _without_toolkits(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_HIDE_TOOLKITS, encoding="utf-8")
    before = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    return {"HOROVOD_WITHOUT_NVTX": "1", "PYTHONPATH": os.pathsep.join([str(site), *before])}


def build_wheel(
    machine: Machine,
    plan: BuildPlan,
    *,
    source: Path | None,
    cache: Path,
    log: Path,
    environ: Mapping[str, str],
    on_percent: Callable[[int], None],
) -> Path:
    """Build Horovod, store the wheel in the cache, and return its path there.

    Args:
        source: the release on disk, already verified; None to download it. A copy in the build's
            folder is edited.
        on_percent: called with make's progress, 0 to 100, increasing.
    """
    furthest = 0

    def follow(line: str) -> None:
        nonlocal furthest
        percent = _PERCENT.match(line)
        if percent and int(percent.group(1)) > furthest:
            furthest = int(percent.group(1))
            on_percent(furthest)

    with tempfile.TemporaryDirectory(prefix="trainkit-horovod-") as name:
        folder = Path(name)
        version = build_version(machine, plan)
        source = edited_source(source or fetch_source(folder, log), folder / "source", version)
        # pip's own wheel cache ignores the options above, and could return a build with other ones.
        options = [
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--no-binary",
            "horovod",
        ]
        command = pip("wheel", *options, "--wheel-dir", str(folder / "wheels"), str(source))
        env = build_environment(machine, plan, folder, environ)
        run(command, what=f"Building Horovod {version}", log=log, env=env, on_line=follow)
        wheel = next((folder / "wheels").glob("horovod-*.whl"))
        sbom.add(sbom.describe(machine, plan, version), wheel)
        return store(wheel, cache / "wheels" / wheel_key(machine, plan, environ))
