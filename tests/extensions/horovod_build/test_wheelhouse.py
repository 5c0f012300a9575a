"""A wheelhouse: pip finds what fits this machine, in a folder and behind a URL;
what is missing is named.
"""

from __future__ import annotations

import functools
import http.server
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.extensions.horovod_build.test_build import MACHINE
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build import wheelhouse
from trainkit.extensions.horovod_build.patches import identity, version
from trainkit.extensions.horovod_build.probe import InstalledTorch
from trainkit.extensions.horovod_build.tools import Tool

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
PLAIN = f"{version()}.torch2.15.0.cu132"
HERE = replace(MACHINE, mpirun=Tool("/usr/bin/mpirun", "Open MPI 4.1.4"))
WITH_GPU = replace(HERE, torch=InstalledTorch("2.15.0+cu132", "13.2", gpus=8))


def write_wheel(folder: Path, version: str, python: str = TAG, name: str = "horovod") -> Path:
    """Write an empty wheel that pip takes."""
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"{python}-{python}-linux_x86_64" if python.startswith("cp") else f"{python}-none-any"
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip finds; the test fills it."""
    found: list[str] = []
    monkeypatch.setattr(wheelhouse, "offered", lambda place: (found, []))
    return found


def test_pip_finds_the_wheels_of_a_folder_and_of_a_url(tmp_path: Path, server: str):
    """Those of another Python are left out;
    a page of links, as web servers make them of a folder, is read too.
    """
    for name, python in (
        (PLAIN, TAG),
        (f"{PLAIN}.openmpi4.1.4", TAG),
        (f"{PLAIN}.nccl.cuda13.0", "cp38"),
    ):
        write_wheel(tmp_path, name, python)
    for place in (str(tmp_path), server):
        versions, _ = wheelhouse.offered(place)
        assert sorted(versions) == [PLAIN, f"{PLAIN}.openmpi4.1.4"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of the test's folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/"
        serving.shutdown()
        thread.join()


OTHER_TORCH, OTHER_EDITS = PLAIN.replace("2.15", "2.11"), PLAIN.replace(identity(), "e00000000")
OPEN_4, OPEN_5, MPICH = (f"{PLAIN}.{mpi}" for mpi in ("openmpi4.1.4", "openmpi5.0.1", "mpich4.0.2"))


def test_the_build_for_this_torch_edits_and_mpi_is_taken(offers: list[str]):
    """MPI only on request, and of the same family and major version;
    the very same version comes first.
    """
    offers += [OTHER_TORCH, OTHER_EDITS, OPEN_5, MPICH, f"{PLAIN}.openmpi4.0.1", OPEN_4, PLAIN]
    assert wheelhouse.select("wheels", HERE, mpi=False, gpu=None) == PLAIN
    assert wheelhouse.select("wheels", HERE, mpi=True, gpu=None) == OPEN_4
    newer = replace(HERE, mpirun=Tool("/usr/bin/mpirun", "Open MPI 4.1.6"))
    assert wheelhouse.select("wheels", newer, mpi=True, gpu=None).startswith(f"{PLAIN}.openmpi4.")


def test_nccl_is_taken_where_a_gpu_is(offers: list[str]):
    """With a GPU the build with NCCL, or else one without; --gpu and --cpu leave no choice."""
    offers += [PLAIN]
    assert wheelhouse.select("wheels", WITH_GPU, mpi=False, gpu=None) == PLAIN
    with pytest.raises(EngineError, match="no Horovod for torch 2.15.0.cu132, NCCL"):
        wheelhouse.select("wheels", WITH_GPU, mpi=False, gpu=True)
    offers += [f"{PLAIN}.nccl.cuda13.0"]
    assert wheelhouse.select("wheels", WITH_GPU, mpi=False, gpu=None) == f"{PLAIN}.nccl.cuda13.0"
    assert wheelhouse.select("wheels", WITH_GPU, mpi=False, gpu=False) == PLAIN
    assert wheelhouse.select("wheels", HERE, mpi=False, gpu=None) == PLAIN


def test_what_is_missing_is_named_with_what_is_there_and_the_command(
    offers: list[str], tmp_path: Path
):
    """The message lists the wheels for this Python, else the files, else what pip said;
    and how to make the one.
    """
    make = f"python -m trainkit horovod wheel --mpi --torch {HERE.torch.version} --out DIR"  # type: ignore[union-attr]
    offers += [OTHER_TORCH]
    with pytest.raises(EngineError) as caught:
        wheelhouse.select(str(tmp_path), HERE, mpi=True, gpu=None)
    assert (
        f"openmpi4.1.4, trainkit's edits {identity()}; for this Python it has:\n  {OTHER_TORCH}\n"
        in str(caught.value)
    )
    assert make in str(caught.value)
    offers.clear()
    file = write_wheel(tmp_path, PLAIN, "cp38")
    with pytest.raises(
        EngineError, match=f"for other Pythons or processors:\n  {file.name.replace('+', '.')}"
    ):
        wheelhouse.select(str(tmp_path), HERE, mpi=False, gpu=None)


def test_a_wheelhouse_that_cannot_be_read_is_refused(tmp_path: Path):
    """A folder that does not exist is an error of the option;
    a server that does not answer is reported in pip's words.
    """
    with pytest.raises(ConfigError, match=r"--wheelhouse is '.*/none', which is no folder"):
        wheelhouse.select(str(tmp_path / "none"), HERE, mpi=False, gpu=None)
    with pytest.raises(EngineError, match="pip found none there: .*connection"):
        wheelhouse.select("http://127.0.0.1:9/wheels", HERE, mpi=False, gpu=None)


def test_mpi_needs_an_mpirun():
    """--mpi on a machine without mpirun is refused: there would be nothing to start the ranks."""
    with pytest.raises(ConfigError, match="--mpi is given, but there is no mpirun"):
        wheelhouse.select(".", MACHINE, mpi=True, gpu=None)
