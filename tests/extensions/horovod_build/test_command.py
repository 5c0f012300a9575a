"""`python -m trainkit horovod`:
its help, its errors, and the way from a request to an installed Horovod.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import EngineError
from trainkit.extensions.horovod_build import command as horovod
from trainkit.extensions.horovod_build import wheel as wheels
from trainkit.extensions.horovod_build.check import Installed
from trainkit.extensions.horovod_build.patches import identity, version
from trainkit.extensions.horovod_build.probe import InstalledTorch, Machine
from trainkit.extensions.horovod_build.tools import Tool

MACHINE = Machine(
    torch=InstalledTorch("2.15.0"),
    compiler=Tool("/usr/bin/c++", "c++ 12.2.0"),
    make=Tool("/usr/bin/make", "GNU Make 4.3"),
    cmake=Tool("/usr/bin/cmake", "cmake version 3.25.1"),
    mpicxx=None,
    nvcc=None,
    nccl=None,
    platform="x86_64",
    cores=2,
    free_gib=8.0,
)
GOOD = Installed(version(), "2.15.0", ("gloo",), None)


class Steps:
    """Replaces everything slow, and records the calls."""

    def __init__(self, cache: Path) -> None:
        self.done: list[str] = []
        self.machine = MACHINE
        self.installed: Installed | None = None
        self.proof: EngineError | None = None
        self.cache = cache

    def build(self, *_: Any, on_percent: Any, **__: Any) -> Path:
        """Note a build; report percents as make does."""
        self.done.append("build")
        for percent in [*range(0, 100, 3), 100]:
            on_percent(percent)
        return self.cache / "built.whl"

    def prove(self, _log: Path, _env: Any, mpirun: Tool | None) -> list[str]:
        """Record a test of Horovod, and fail if requested."""
        self.done.append("prove" if mpirun is None else "prove by mpirun")
        if self.proof is not None:
            raise self.proof
        return ["rank 0 of 2, allreduce on cpu gives 11", "rank 1 of 2, allreduce on cpu gives 11"]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Replace everything slow by a recorder, and use a cache of the test's own."""
    steps = Steps(tmp_path)
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    for module in (horovod, wheels):
        monkeypatch.setattr(module, "probe", lambda environ: steps.machine)
    monkeypatch.setattr(horovod.build_check, "look", lambda: steps.installed)
    monkeypatch.setattr(horovod.build_check, "prove", steps.prove)
    monkeypatch.setattr(wheels.build, "build_wheel", steps.build)
    monkeypatch.setattr(horovod.pip, "missing_needs", lambda needs, machine: [])
    monkeypatch.setattr(
        horovod.pip, "install_wheel", lambda wheel, log: steps.done.append(f"install {wheel.name}")
    )
    return steps


def _fill_cache(steps: Steps, content: bytes) -> None:
    folder = steps.cache / "wheels" / wheels.build.wheel_key(MACHINE, PLAN, {})
    folder.mkdir(parents=True)
    (folder / "horovod-cached.whl").write_bytes(content)


PLAN = horovod.choose(MACHINE, horovod.Wanted())
EMPTY_ZIP = b"PK\x05\x06" + b"\0" * 18


@pytest.mark.parametrize("command", [[], ["install"], ["wheel"], ["check"]])
def test_help_says_what_it_does(command: list[str], capsys: pytest.CaptureFixture[str]):
    """Each level explains itself and ends with exit code 0."""
    with pytest.raises(SystemExit) as ended:
        horovod.main("horovod", [*command, "--help"])
    assert ended.value.code == 0
    assert "python -m trainkit horovod" in capsys.readouterr().out


def test_help_does_not_wait_for_torch():
    """The command's module is imported without torch."""
    ask = "import sys, trainkit.extensions.horovod_build.command; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "False"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["build"],
        ["install", "--jobs", "0"],
        ["install", "--mpi", "--no-mpi"],
        ["install", "--gpu", "--cpu"],
        ["install", "--wheelhouse", "wheels", "--source", "horovod-0.28.1.tar.gz"],
    ],
)
def test_wrong_arguments_end_with_2(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    """No command, an unknown one, --jobs 0 and contradictions
    are refused before anything is done.
    """
    with pytest.raises(SystemExit) as ended:
        horovod.main("horovod", wrong)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_first_install_builds_installs_and_proves(steps: Steps, capsys: pytest.CaptureFixture[str]):
    """Without an installed or cached Horovod it is built, installed and tested,
    with a line per ten percent.
    """
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["build", "install built.whl", "prove"]
    out = capsys.readouterr().out
    assert out.count("  compiling ") == 10
    assert "rank 1 of 2, allreduce on cpu gives 11" in out


def test_cached_wheel_saves_the_build(steps: Steps):
    """A wheel of the same build is installed and proven; a compiler is not even needed."""
    _fill_cache(steps, EMPTY_ZIP)
    steps.machine = replace(MACHINE, compiler=None, make=None)
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["install horovod-cached.whl", "prove"]


def test_damaged_cached_wheel_is_built_again(steps: Steps, capsys: pytest.CaptureFixture[str]):
    """A cached wheel that fails its zip test is replaced, with a message."""
    _fill_cache(steps, b"not a zip file")
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["build", "install built.whl", "prove"]
    assert "is damaged; building again" in capsys.readouterr().out


def test_right_build_is_only_proven(steps: Steps):
    """If the right Horovod is installed nothing is built or installed; the test still runs."""
    steps.installed = GOOD
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["prove"]


WITH_MPI = replace(
    MACHINE,
    mpicxx=Tool("/usr/bin/mpicxx", "g++ -lmpi"),
    mpirun=Tool("/usr/bin/mpirun", "Open MPI 4.1.4"),
)


def test_mpi_is_built_on_request_and_proven_with_mpirun(
    steps: Steps, capsys: pytest.CaptureFixture[str]
):
    """--mpi says which MPI was found, replaces a build without it, and tests both launchers."""
    steps.machine, steps.installed = WITH_MPI, GOOD
    assert horovod.main("horovod", ["install", "--mpi"]) == 0
    assert steps.done == ["build", "install built.whl", "prove", "prove by mpirun"]
    out = capsys.readouterr().out
    assert "MPI           yes  (Open MPI 4.1.4: /usr/bin/mpicxx, /usr/bin/mpirun)" in out
    assert "Proof: mpirun -np 2 (Open MPI 4.1.4)" in out


def test_an_mpi_that_is_there_stays_out(steps: Steps, capsys: pytest.CaptureFixture[str]):
    """Without --mpi a Horovod without MPI stays, and one with MPI is replaced, which is said."""
    steps.machine, steps.installed = WITH_MPI, GOOD
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["prove"]
    assert (
        "MPI           no   (--mpi builds with Open MPI 4.1.4, which is here)"
        in capsys.readouterr().out
    )
    steps.installed = replace(GOOD, parts=("gloo", "mpi"))
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["prove", "build", "install built.whl", "prove"]
    assert "one without it takes its place (--mpi keeps it)" in capsys.readouterr().out


def test_rebuild_builds_whatever_is_there(steps: Steps):
    """--rebuild ignores the installed Horovod and the cache."""
    steps.installed = GOOD
    _fill_cache(steps, EMPTY_ZIP)
    assert horovod.main("horovod", ["install", "--rebuild"]) == 0
    assert steps.done == ["build", "install built.whl", "prove"]


@pytest.mark.parametrize(
    "change",
    [{"built_for": "2.13.0"}, {"version": "0.28.1"}, {"version": "0.28.1+trainkit.e00000000"}],
)
def test_horovod_that_does_not_fit_is_replaced(change: dict[str, str], steps: Steps):
    """After a change of torch, and if the edits are missing or another trainkit's,
    install builds again.
    """
    steps.installed = replace(GOOD, **change)
    assert horovod.main("horovod", ["install"]) == 0
    assert steps.done == ["build", "install built.whl", "prove"]


@pytest.mark.parametrize(("option", "word"), [("--mpi", "mpicxx"), ("--gpu", "without CUDA")])
def test_part_that_cannot_be_built_is_refused(
    option: str, word: str, steps: Steps, capsys: pytest.CaptureFixture[str]
):
    """A part that the machine cannot build is refused with exit code 2 and a reason,
    and nothing is done.
    """
    assert horovod.main("horovod", ["install", option]) == 2
    assert word in capsys.readouterr().err
    assert steps.done == []


def test_wrong_source_is_refused_first(
    steps: Steps, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A source with another hash ends the command with 1,
    even if a cached wheel would have served.
    """
    _fill_cache(steps, EMPTY_ZIP)
    (tmp_path / "horovod-0.28.1.tar.gz").write_bytes(b"something else")
    assert (
        horovod.main("horovod", ["install", "--source", str(tmp_path / "horovod-0.28.1.tar.gz")])
        == 1
    )
    assert "none of it was run" in capsys.readouterr().err
    assert steps.done == []


def test_failed_proof_ends_with_1(steps: Steps, capsys: pytest.CaptureFixture[str]):
    """An installation that fails its test is a failure, and the message says how to build again."""
    steps.proof = EngineError("The proof failed")
    assert horovod.main("horovod", ["install"]) == 1
    assert "install --rebuild" in capsys.readouterr().err


def test_check_shows_what_is_there_and_proves_it(steps: Steps, capsys: pytest.CaptureFixture[str]):
    """check names version, torch and parts, and ends with 0 after the proof."""
    steps.installed = GOOD
    assert horovod.main("horovod", ["check"]) == 0
    out = capsys.readouterr().out
    for word in (
        "Horovod 0.28.1",
        "built for     torch 2.15.0",
        f"edits         {identity()}",
        "Gloo          yes",
        "MPI           no",
        "rank 0 of 2",
    ):
        assert word in out


def test_check_without_proof_starts_no_ranks(steps: Steps):
    """--no-proof only reports."""
    steps.installed = GOOD
    assert horovod.main("horovod", ["check", "--no-proof"]) == 0
    assert steps.done == []


@pytest.mark.parametrize(
    "installed",
    [
        None,
        replace(GOOD, built_for="2.13.0"),
        replace(GOOD, error="ImportError: x"),
        replace(GOOD, version="0.28.1"),
    ],
)
def test_check_of_a_bad_state_names_the_cure(
    installed: Installed | None, steps: Steps, capsys: pytest.CaptureFixture[str]
):
    """None, one for another torch, without the edits or that does not
    import end with 1 and the command that repairs it.
    """
    steps.installed = installed
    assert horovod.main("horovod", ["check"]) == 1
    assert "python -m trainkit horovod install" in capsys.readouterr().err
    assert steps.done == []


def test_folder_that_cannot_be_made_is_named(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """A cache that cannot be written is an error that names the variable for another one."""
    (steps.cache / "file").touch()
    monkeypatch.setenv("TRAINKIT_CACHE", str(steps.cache / "file" / "cache"))
    assert horovod.main("horovod", ["install"]) == 1
    assert "TRAINKIT_CACHE" in capsys.readouterr().err
