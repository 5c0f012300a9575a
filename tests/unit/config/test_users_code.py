"""Which modules are the user's own,
and what the config of a run that came from elsewhere may build.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from tests.unit.config.test_of_run import job_of
from trainkit.cli.run import main
from trainkit.config.allowlist import check_name
from trainkit.config.compose import ComposedJob
from trainkit.errors import ConfigError

MODULE = "import trainkit\nopen('ran', 'w').close()\nclass Mine(trainkit.Callback):\n    pass\n"
TARGETS = ["theirs.evil.Mine", "outputs.theirs.evil.Mine", "regular.theirs.evil.Mine"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current folder from which modules are imported;
    what a test imports is forgotten after it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


@functools.cache
def files_of_a_run() -> dict[str, str]:
    """Return the files that a run of conf=mlp has in its folder."""
    return job_of("fit", "conf=mlp").files


def write_run(folder: Path, target: str) -> None:
    """Make the folder of a run whose config names a callback, with a module beside its files."""
    for name, text in files_of_a_run().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        is_config = name.endswith("config.yaml")
        (folder / name).write_text(
            text.replace("callbacks:\n", f"callbacks:\n  x: {{_target_: {target}}}\n")
            if is_config
            else text
        )
        assert not is_config or target in (folder / name).read_text()
    (folder / "evil.py").write_text(MODULE)
    (folder / "checkpoints" / "last").mkdir(parents=True)


def refused(command: str, *arguments: str) -> bool:
    """Return whether a command ends with code 2 before its job."""
    jobs: list[ComposedJob] = []
    return main(command, arguments, jobs.append) == 2 and not jobs


@pytest.mark.parametrize(
    "command, target",
    [
        *(("validate", target) for target in TARGETS),
        *((c, TARGETS[1]) for c in ("fit", "predict", "plan")),
    ],
)
def test_a_downloaded_run_does_not_run_its_own_code(
    command: str, target: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that names a module of its own folder is refused,
    unless the command line trusts the module.
    """
    folder = here.joinpath(*target.split(".")[:-2])
    write_run(folder, target)
    (here / "regular").mkdir(exist_ok=True)
    (here / "regular" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    assert refused(command, f"run_dir={folder.relative_to(here)}")
    assert f"trust=[{target.rpartition('.')[0]}]" in capsys.readouterr().err
    assert not (here / "ran").exists()
    assert not refused(
        command, f"run_dir={folder.relative_to(here)}", f"trust=[{target.rpartition('.')[0]}]"
    )


@pytest.mark.parametrize("place", ["recipes", "theirs"])
def test_the_folder_of_a_run_as_the_current_one_opens_nothing(
    place: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its conf/ came with it, and so did a recipes/ beside it."""
    write_run(here, f"{place}.Mine")
    (here / place).mkdir()
    (here / place / "__init__.py").write_text(MODULE)
    (here / "conf").mkdir()
    (here / "conf" / "own.yaml").write_text(f"callbacks: {{x: {{_target_: {place}.Mine}}}}\n")
    assert refused("validate", "run_dir=.")
    assert f"trust=[{place}" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["conf", "command"])
def test_a_runs_config_may_name_what_the_user_names(where: str, here: Path) -> None:
    """A module of the user's own that a file of conf/ or this command names needs no trust;
    unnamed it does.
    """
    write_run(here / "runs" / "mine", "own.Mine")
    (here / "own.py").write_text(MODULE)
    assert refused("validate", "run_dir=runs/mine")
    (here / "conf" / "callbacks").mkdir(parents=True)
    if where == "conf":
        (here / "conf" / "callbacks" / "own.yaml").write_text("{'_target_': own.Mine}\n")
    typed = ["callbacks.y={_target_: own.Mine}"] if where == "command" else []
    assert not refused("validate", "run_dir=runs/mine", *typed)


def test_packages_with_a_file_of_their_own_are_the_users(here: Path) -> None:
    """A module and a package with __init__.py may be named;
    a folder without one may not, and the message says why.
    """
    (here / "own_package").mkdir()
    (here / "own_package" / "tasks.py").write_text(MODULE)
    with pytest.raises(ConfigError, match=r"own_package has no __init__\.py"):
        check_name("own_package.tasks.Mine", "task._target_", [])
    (here / "own_package" / "__init__.py").write_text("")
    check_name("own_package.tasks.Mine", "task._target_", [])
