"""The installed Horovod: whether it fits, and what counts as a passed test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import EngineError
from trainkit.extensions.horovod_build import check as horovod_proof
from trainkit.extensions.horovod_build.check import Installed, look, mpi_start, prove
from trainkit.extensions.horovod_build.patches import version
from trainkit.extensions.horovod_build.probe import BuildPlan, Choice, Wanted
from trainkit.extensions.horovod_build.tools import Tool

GOOD = Installed(version(), "2.15.0", ("gloo",), None)
CPU = BuildPlan(mpi=Choice(False, ""), gpu=Choice(False, ""), jobs=2)
MPI = replace(CPU, mpi=Choice(True, ""))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": "0.27.0"}, "it is version 0.27.0"),
        ({"version": "0.28.1"}, "it has none of trainkit's edits"),
        (
            {"version": "0.28.1+trainkit.e00000000"},
            "edits of another version (e00000000; this trainkit's are e",
        ),
        ({"built_for": None}, "built without torch"),
        ({"built_for": "2.13.0"}, "built for torch 2.13.0, and torch 2.15.0 is installed"),
        (
            {"error": "ImportError: undefined symbol"},
            "does not import: ImportError: undefined symbol",
        ),
        ({"parts": ("mpi",)}, "built without Gloo"),
    ],
)
def test_horovod_that_does_not_fit_is_explained(change: dict[str, Any], problem: str):
    """Another version, no edits or old ones, another torch,
    a failed import a build without Gloo have their own messages.
    """
    assert GOOD.problem("2.15.0") is None
    assert problem in str(replace(GOOD, **change).problem("2.15.0"))


def test_installed_build_serves_what_is_asked():
    """NCCL beyond the plan is accepted if the choice is open;
    MPI is there if, and only if, it is requested.
    """
    with_mpi = replace(GOOD, parts=("gloo", "mpi"))
    with_nccl = replace(GOOD, parts=("gloo", "nccl"))
    assert GOOD.serves(CPU, Wanted())
    assert not GOOD.serves(MPI, Wanted(mpi=True))
    assert with_mpi.serves(MPI, Wanted(mpi=True))
    assert not with_mpi.serves(CPU, Wanted())
    assert with_nccl.serves(CPU, Wanted())
    assert not with_nccl.serves(CPU, Wanted(gpu=False))


def _fake_horovod(folder: Path, init: str) -> str:
    info = folder / f"horovod-{version()}.dist-info"
    torch = folder / "horovod" / "torch"
    for made in (info, torch):
        made.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version()}\n")
    (folder / "horovod" / "__init__.py").touch()
    (folder / "horovod" / "metadata.json").write_text('{"pytorch": "2.15.0", "dummy": "none"}')
    (torch / "__init__.py").write_text(init)
    return str(folder)


def test_library_that_does_not_load_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Horovod imports with a mere warning if its library does not load;
    it still counts as broken.
    """
    monkeypatch.setenv(
        "PYTHONPATH", _fake_horovod(tmp_path, "print('Warning! MPI libs are missing')")
    )
    installed = look()
    assert installed is not None
    assert (installed.version, installed.built_for) == (version(), "2.15.0")
    assert "mpi_lib_v2" in str(installed.error)


def test_crash_on_import_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A library that crashes Python is reported, and does not crash the caller."""
    monkeypatch.setenv("PYTHONPATH", _fake_horovod(tmp_path, "import os; os._exit(77)"))
    installed = look()
    assert installed is not None
    assert installed.problem("2.15.0") == "it does not import: the import ended with exit code 77"


def test_horovod_that_loads_names_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its parts come from its own functions."""
    init = (
        "mpi_lib_v2 = None\ngloo_built = nccl_built = lambda: 1\nmpi_built = cuda_built ="
        " lambda: 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", _fake_horovod(tmp_path, init))
    assert look() == Installed(version(), "2.15.0", ("gloo", "nccl"), None)


def _prove_with(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], dict[str, str]]:
    seen: dict[str, str] = {}

    def fake_run(command: list[str], *, env: dict[str, str], **_: Any) -> list[str]:
        seen.update(env)
        return lines

    monkeypatch.setattr(horovod_proof, "run", fake_run)
    return prove(tmp_path / "log", {"HOROVOD_CONTROLLER": "mpi", "HOME": "/home/me"}), seen


def _line(rank: int, size: int = 2, total: int = 11) -> str:
    return f"[{rank}]<stdout>:trainkit proof: rank {rank} of {size}, allreduce on cpu gives {total}"


def test_sum_over_both_ranks_is_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both ranks with the right sum pass the test, in the order of ranks,
    whatever else Horovod prints.
    """
    proven, env = _prove_with([_line(1), "[0]<stderr>:noise", _line(0)], tmp_path, monkeypatch)
    assert [line[:6] for line in proven] == ["rank 0", "rank 1"]
    assert env == {"HOME": "/home/me"}


def test_two_ranks_may_share_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """mpirun joins what both write at once; 110 is not 11."""
    one, other = (_line(rank).partition(":")[2] for rank in (0, 1))
    proven, _ = _prove_with([one + other], tmp_path, monkeypatch)
    assert [line[:6] for line in proven] == ["rank 0", "rank 1"]
    with pytest.raises(EngineError, match="other numbers than 11"):
        _prove_with([one + other + "0"], tmp_path, monkeypatch)


def test_mpirun_is_not_given_what_it_would_refuse(monkeypatch: pytest.MonkeyPatch):
    """Open MPI refuses root, and more ranks than cores; MPICH knows neither option."""
    monkeypatch.setattr(horovod_proof.os, "geteuid", lambda: 0)
    start = ["/usr/bin/mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    assert mpi_start(Tool("/usr/bin/mpirun", "Open MPI 4.1.4")) == start
    assert mpi_start(Tool("/usr/bin/mpirun", "MPICH 4.0.2")) == ["/usr/bin/mpirun", "-np", "2"]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [_line(0)],
        [_line(0), _line(0)],
        [_line(0, size=3), _line(1, size=3)],
        [_line(0), _line(1, total=1)],
    ],
    ids=["silent", "one rank", "the same rank twice", "a larger world", "wrong sum"],
)
def test_anything_else_is_no_proof(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No output, one rank, a rank twice, a world of another size and a wrong sum all fail."""
    with pytest.raises(EngineError, match="other numbers than 11"):
        _prove_with(lines, tmp_path, monkeypatch)
