"""An environment of its own for a build: really made, with a torch of the test's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.extensions.horovod_build.test_wheelhouse import write_wheel
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build import elsewhere


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source is a folder with a torch 9.9.2; environments are made below `made`."""
    write_wheel(tmp_path / "wheels", "9.9.2", "py3", name="torch")
    (tmp_path / "made").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(elsewhere.tempfile, "tempdir", str(tmp_path / "made"))
    monkeypatch.setattr(elsewhere, "_NEEDS", ())
    return tmp_path


def run_in(folder: Path, arguments: list[str], torch: str) -> int:
    """Run a command of trainkit in an environment that is made for it."""
    said: list[str] = []
    log = folder / "log"
    code = elsewhere.run_in(
        arguments, python=sys.executable, torch=torch, environ=os.environ, log=log, say=said.append
    )
    assert "torch==9.9" in said[0]
    return code


def test_the_command_runs_with_that_torch_and_this_trainkit(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    """Its exit code is returned, `9.9` takes the newest patch,
    and nothing is left of the environment.
    """
    assert run_in(folder, ["horovot"], "9.9") == 2
    assert "'horovot' is not a command. Did you mean 'horovod'?" in capfd.readouterr().err
    assert "Successfully installed torch-9.9.2" in (folder / "log").read_text()
    assert list((folder / "made").iterdir()) == []


def test_a_torch_that_the_index_lacks_ends_it(folder: Path):
    """The error names the requirement; the environment is deleted."""
    with pytest.raises(EngineError, match=r"Installing torch==9\.9\.3 failed"):
        run_in(folder, ["--version"], "9.9.3")
    assert list((folder / "made").iterdir()) == []


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("3.9", "trainkit runs on Python 3.10 or later"),
        (
            "3.99",
            r"python3\.99 is not on the PATH. .*apt-get install python3\.99-dev python3\.99-venv",
        ),
        ("/bin/false", "/bin/false is no Python that runs"),
    ],
)
def test_a_python_that_is_not_there_is_refused(python: str, words: str):
    """Too old, not installed, or a program that is none:
    pyenv's names are files that run no Python.
    """
    with pytest.raises(ConfigError, match=f"--python is {python}.*{words}"):
        elsewhere.find_python(python, os.environ)


def test_a_version_is_a_version():
    """2.15 is the newest patch, the others are exact;
    anything else is refused before pip sees it.
    """
    assert elsewhere.torch_requirement("2.15") == "torch==2.15.*"
    assert elsewhere.torch_requirement("2.15.0") == "torch==2.15.0"
    assert elsewhere.torch_requirement("2.15.0+cu130") == "torch==2.15.0+cu130"
    with pytest.raises(ConfigError, match="--torch is '>=2'"):
        elsewhere.torch_requirement(">=2")
