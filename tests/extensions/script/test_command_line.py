"""A script among a command's arguments, and scripts that cannot be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.script.command_line import Script, check_script, split_script

OWN = ("kill_at", "ranks")


@pytest.mark.parametrize(
    ("typed", "before", "script"),
    [
        (["ranks=2", "mine.py", "--lr", "1"], ["ranks=2"], Script("mine.py", ("--lr", "1"))),
        (["a/mine.py", "other.py"], [], Script("a/mine.py", ("other.py",))),
        (["conf=mlp", "data.file=x.py"], ["conf=mlp", "data.file=x.py"], None),
        (["--log=x.py", "conf=mlp"], ["--log=x.py", "conf=mlp"], None),
        ([], [], None),
    ],
)
def test_a_script_parts_the_arguments(
    typed: list[str], before: list[str], script: Script | None
) -> None:
    """What stands before the first file of Python is the command's, the rest the script's."""
    assert split_script(typed) == (before, script)


@pytest.mark.parametrize(
    ("left", "script", "needed", "message"),
    [
        ([], Script("main.py"), "", "There is no script main.py in .*Did you mean 'mine.py'?"),
        ([], Script("folder.py"), "", "folder.py is a folder; it must be a Python script."),
        (
            ["kil_at=3"],
            Script("mine.py"),
            "",
            "check-resume has no option 'kil_at'. Did you mean 'kill_at'?.*after it",
        ),
        (
            [],
            Script("mine.py", ("kill_at=3",)),
            "kill_at",
            "kill_at=3 stands after mine.py, .*check-resume kill_at=3 mine.py",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    left: list[str],
    script: Script,
    needed: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each mistake has a sentence that says what to type."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_script("check-resume", script, left, OWN, needed)


def test_a_script_that_is_there_is_taken(tmp_path: Path) -> None:
    """Nothing is refused without a mistake, and arguments of the script may be anything."""
    (tmp_path / "mine.py").touch()
    check_script("plan", Script(str(tmp_path / "mine.py"), ("ranks=3", "--x")), [], OWN)
    assert re.match("mine", Script(str(tmp_path / "mine.py")).name)
