"""`python -m trainkit horovod wheel`, and `install --wheelhouse`:
what they do, and what they refuse.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.horovod_build.test_command import (
    EMPTY_ZIP,
    GOOD,
    MACHINE,
    WITH_MPI,
    Steps,
    _fill_cache,
    steps,
)
from trainkit.extensions.horovod_build import command as horovod
from trainkit.extensions.horovod_build import wheel as wheels
from trainkit.extensions.horovod_build.probe import InstalledTorch, Nccl
from trainkit.extensions.horovod_build.tools import Tool

__all__ = ["steps"]
CUDA = replace(
    MACHINE,
    torch=InstalledTorch("2.15.0", "13.2"),
    nvcc=Tool("/opt/cuda/bin/nvcc", "13.0"),
    nccl=Nccl("/include", "/libnccl.so.2"),
)


def test_a_wheel_of_this_environment_is_written_and_not_installed(
    steps: Steps, capsys: pytest.CaptureFixture[str]
):
    """From the cache it is copied into --out; the message has the command that installs it."""
    _fill_cache(steps, EMPTY_ZIP)
    assert horovod.main("horovod", ["wheel", "--out", str(steps.cache / "wheels out")]) == 0
    assert [file.name for file in (steps.cache / "wheels out").iterdir()] == ["horovod-cached.whl"]
    assert steps.done == []
    assert f"horovod install --wheelhouse '{steps.cache}/wheels out'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "cuda", "code", "words"),
    [
        (MACHINE, "13.0", 2, "--gpu is given, but torch 2.15.0 is built without CUDA"),
        (CUDA, "12.8", 2, "--cuda is 12.8, but nvcc is of CUDA 13.0"),
        (CUDA, "13.0", 0, "NCCL          yes  (requested by --gpu)"),
    ],
)
def test_cuda_is_the_toolkit_that_is_there(
    machine: Any, cuda: str, code: int, words: str, steps: Steps, capsys: Any
):
    """--cuda builds with NCCL though torch sees no GPU;
    another toolkit, or a torch without CUDA, is refused.
    """
    steps.machine = machine
    (steps.cache / "built.whl").write_bytes(EMPTY_ZIP)
    assert (
        horovod.main("horovod", ["wheel", "--cuda", cuda, "--out", str(steps.cache / "out")])
        == code
    )
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    assert steps.done == (["build"] if code == 0 else [])


def test_another_torch_is_an_environment_of_its_own(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    """The same command runs there without --torch and --python,
    with paths that do not depend on the folder.
    """
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        wheels.elsewhere,
        "run_in",
        lambda words, **settings: asked.update(settings, words=words) or 3,
    )
    monkeypatch.chdir(steps.cache)
    assert (
        horovod.main(
            "horovod", ["wheel", "--torch", "2.11", "--mpi", "--cpu", "--jobs", "4", "--out", "out"]
        )
        == 3
    )
    out = str(steps.cache / "out")
    assert asked["words"] == ["horovod", "wheel", "--mpi", "--cpu", "--jobs", "4", "--out", out]
    assert (asked["torch"], asked["python"]) == ("2.11", None)
    assert horovod.main("horovod", ["wheel", "--python", "3.12"]) == 3
    assert (asked["torch"], asked["python"]) == ("2.15.0", "3.12")


def test_a_folder_that_cannot_be_written_is_refused(
    steps: Steps, capsys: pytest.CaptureFixture[str]
):
    """The error names the option and the folder."""
    _fill_cache(steps, EMPTY_ZIP)
    (steps.cache / "file").touch()
    assert horovod.main("horovod", ["wheel", "--out", str(steps.cache / "file" / "out")]) == 2
    assert f"--out is {steps.cache}/file/out, which cannot be written" in capsys.readouterr().err


@pytest.fixture
def taken(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A wheelhouse that has the version of GOOD."""
    monkeypatch.setattr(
        horovod.wheelhouse, "select", lambda place, machine, *, mpi, gpu: GOOD.version
    )
    install = lambda place, version, log: steps.done.append(f"take from {place}")  # noqa: E731
    monkeypatch.setattr(horovod.wheelhouse, "install", install)
    return steps


def test_a_wheelhouse_needs_no_compiler(taken: Steps, tmp_path: Path):
    """Its wheel is installed and tested, with mpirun too where it has MPI; nothing is built."""
    taken.machine = replace(WITH_MPI, compiler=None, make=None, mpicxx=None)
    assert horovod.main("horovod", ["install", "--wheelhouse", "wheels"]) == 0
    assert taken.done == ["take from wheels", "prove"]
    assert horovod.main("horovod", ["install", "--wheelhouse", "wheels", "--mpi"]) == 0
    assert taken.done[2:] == ["take from wheels", "prove", "prove by mpirun"]


def test_what_is_installed_already_is_only_tested(taken: Steps):
    """The same version stays, unless --rebuild, or an import that fails, says otherwise."""
    taken.installed = GOOD
    assert horovod.main("horovod", ["install", "--wheelhouse", "wheels"]) == 0
    assert taken.done == ["prove"]
    taken.installed = replace(GOOD, error="ImportError: x")
    assert horovod.main("horovod", ["install", "--wheelhouse", "wheels"]) == 0
    assert taken.done == ["prove", "take from wheels", "prove"]
