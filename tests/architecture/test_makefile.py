"""The Makefile: its first command says what it does, its groups are those of the table,
and the workflow runs each.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.groups.table import all_groups

ROOT = Path(__file__).parents[2]


def test_each_group_is_a_command() -> None:
    """`make NAME` runs it, and one job of the workflow does."""
    for name in all_groups():
        asked = subprocess.run(
            ["make", "-n", name], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"python -m tests.groups {name}" in asked.stdout, name
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["groups"]["strategy"]["matrix"]["group"] == list(all_groups())


def test_what_is_given_reaches_the_groups() -> None:
    """`make parallel ARGS=...` hands arguments to pytest, `make test-due MINUTES=25` the time."""
    for command, line in {
        "parallel ARGS=-x": "tests.groups parallel -- -x",
        "test": "tests.groups quick",
        "test-all": "tests.groups all",
        "test-due": "tests.groups due",
        "test-due MINUTES=25": "tests.groups due minutes=25",
    }.items():
        asked = subprocess.run(
            ["make", "-n", *command.split()], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert re.search(rf"{line} *$", asked.stdout, re.MULTILINE), command


def test_train_says_at_once_what_it_does(tmp_path: Path) -> None:
    """Before any set-up, and where it is made already:
    what, how long, and where the results will be.
    """
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    make = ["make", "--no-print-directory", "PYTHON=false"]  # a set-up fails at its first command
    fresh = subprocess.run(
        [*make, "train"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert fresh.returncode != 0
    for part in (
        "ResNet-50",
        "2 ranks under horovodrun",
        "set-up    into .venv",
        "s on 2 cores",
        "1 to 5 minutes",
        "runs/resnet50/",
    ):
        assert part in fresh.stdout, part
    assert "Python's venv module is missing" in fresh.stdout.partition("runs/resnet50/")[2]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").write_text("1")
    made = subprocess.run(
        [*make, "announce"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "set-up    is done" in made.stdout and "never again" not in made.stdout


@pytest.mark.parametrize(
    ("asked", "expected"), [("", ""), ("1", f"PYTHONPYCACHEPREFIX={ROOT}/.venv/bytecode\n")]
)
def test_programs_are_compiled_once(asked: str, expected: str, tmp_path: Path) -> None:
    """In a shell that asks for no bytecode, make puts it into the environment's folder:
    each rank and each test would compile torch again.
    """
    (tmp_path / "shown.mk").write_text("shown: ; @env | grep PYTHON || true")
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": asked}
    made = subprocess.run(
        ["make", "-s", "-f", "Makefile", "-f", tmp_path / "shown.mk", "shown"],
        cwd=ROOT,
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == expected
