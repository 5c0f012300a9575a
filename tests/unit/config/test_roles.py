"""What a config's classes say of themselves:
a user's own launcher, and classes that derive from trainkit's, are recognised.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import run as compose
from trainkit.config.roles import declared_engine, role_of

OWN = """
from pathlib import Path

import trainkit.callbacks
from trainkit import callbacks as given
from trainkit.callbacks import Elastic
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.launch.job_launcher import JobLauncher
from trainkit.extensions.slurm.launcher import SlurmLauncher


class Lasting(Elastic):
    pass


class ByModule(given.Elastic):
    pass


class ByPath(trainkit.callbacks.ModelCheckpoint):
    pass


class MyElastic:
    def __init__(self, file: str = ""):
        pass


class Wire(DDPEngine):
    pass


class Submit(SlurmLauncher):
    pass


class Note(JobLauncher):
    name = "note"
    several = "writes one file."

    def __init__(self, *, file: str) -> None:
        self.file = file

    @classmethod
    def engine_of(cls, settings):
        return "horovod" if settings["file"].endswith(".hvd") else "single"

    def launch(self, fit, words):
        Path(self.file).write_text(" ".join([fit.engine, *words]))
        return 7


class Driver(Note):
    @classmethod
    def keeps_ranks(cls, settings):
        return False


def make(file: str = ""):
    pass
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_roles.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_roles", raising=False)


def fit(*words: str, of: str = "Note") -> int:
    """Run fit with the user's own launcher."""
    return main(
        "fit", ["conf=mlp", f"++launcher._target_=own_roles.{of}", "++launcher.file=a.txt", *words]
    )


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("Lasting", "elastic"),
        ("ByModule", "elastic"),
        ("ByPath", "checkpoints"),
        ("MyElastic", ""),
        ("Absent", ""),
    ],
)
def test_a_callbacks_role_is_read_from_its_source(name: str, role: str) -> None:
    """Of the class or of what it derives from, under any import;
    a name alone says nothing, and nothing is imported.
    """
    assert role_of({"_target_": f"own_roles.{name}"}) == role
    assert "own_roles" not in sys.modules


def test_an_engines_name_is_read_from_its_source() -> None:
    """A class of the user's is what it derives from; without an engine the launcher chooses."""
    assert declared_engine({"engine": {"_target_": "own_roles.Wire"}}) == "ddp"
    assert (
        declared_engine({"engine": {"_target_": "trainkit.engine.select.auto_engine"}})
        == declared_engine({})
        == "auto"
    )
    assert declared_engine({"engine": {"_target_": "own_roles.MyElastic"}}) == ""


def test_a_launcher_of_the_users_own_starts_the_fit(tmp_path: Path) -> None:
    """With its settings, the words as they were typed, and its exit code."""
    assert fit("seed=3", "run_dir=runs/a") == 7
    typed = "fit conf=mlp ++launcher._target_=own_roles.Note ++launcher.file=a.txt seed=3"
    assert (tmp_path / "a.txt").read_text() == f"auto {typed}"


@pytest.mark.parametrize(
    ("of", "words", "text"),
    [
        (
            "Note",
            ["callbacks=elastic"],
            "callbacks.elastic is set, and launcher is note: its jobs keep their ranks",
        ),
        (
            "Note",
            ["++callbacks.mine._target_=own_roles.Lasting"],
            "callbacks.elastic is set, and launcher is note: its jobs keep their ranks",
        ),
        (
            "Note",
            ["launcher.file=a.hvd", "engine=single"],
            "engine is single, and launcher=note asks for several ranks",
        ),
        ("Note", ["++launcher.nodez=2"], "launcher.nodez is not a setting."),
        (
            "Note",
            ["-m", "seed=1,2"],
            "-m runs several jobs in this process, and launcher=note writes one file.",
        ),
        (
            "make",
            [],
            (
                "launcher._target_ is 'own_roles.make', which cannot start ranks; it must be a"
                " class that derives from"
            ),
        ),
        ("MyElastic", [], "launcher._target_ is 'own_roles.MyElastic', which cannot start ranks"),
    ],
)
def test_a_users_launcher_is_asked(
    of: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses what every launcher refuses, by its own name; what is no launcher is explained."""
    assert fit(*words, of=of) == 2
    assert text in capsys.readouterr().err


def test_elastic_is_for_a_launcher_that_replaces_ranks() -> None:
    """As it says."""
    assert fit("callbacks=elastic", of="Driver") == 7


def test_a_launcher_that_derives_from_slurms_submits(capsys: pytest.CaptureFixture[str]) -> None:
    """It is one of Slurm's."""
    words = [
        "conf=mlp",
        "launcher=slurm",
        "launcher._target_=own_roles.Submit",
        "launcher.dry_run=true",
    ]
    assert main("fit", words) == 0
    assert "#SBATCH --nodes=1" in capsys.readouterr().out


def test_a_rank_takes_no_notice_of_a_users_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRAINKIT_LAUNCHER says that a launcher started it."""
    monkeypatch.setenv("TRAINKIT_LAUNCHER", "note")
    jobs: list[object] = []
    words = [
        "conf=mlp",
        "++launcher._target_=own_roles.Note",
        "++launcher.file=a.txt",
        "run_dir=runs/a",
    ]
    compose("fit", words, True, jobs.append)  # type: ignore[arg-type]
    assert len(jobs) == 1 and "own_roles" not in sys.modules


@pytest.mark.parametrize("home", ["extensions.kubernetes", "extensions.ray", "extensions.slurm"])
def test_a_launcher_is_asked_without_torch_and_ray(home: str) -> None:
    """Its class is cheap to import: a mistake in a config is reported at once."""
    code = (
        f"import sys, trainkit.{home}.launcher as _; print({{'ray', 'torch', 'hydra'}} &"
        " set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
