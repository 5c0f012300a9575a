"""The Makefile runs all tests: each folder of tests belongs to a group, and `make test` runs each group."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUPS = re.search(r"^test: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_each_folder_of_tests_belongs_to_a_group() -> None:
    """A folder that no group names would run nowhere."""
    assert GROUPS is not None
    text = (ROOT / "Makefile").read_text()
    recipes = [re.search(rf"^{group}: .*\n((?:\t.*\n)+)", text, re.MULTILINE) for group in GROUPS[1].split()]
    run = " ".join(found[1] for found in recipes if found is not None)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) >= 7
    assert {folder for folder in folders if f"tests/{folder}" not in run} == set()


def test_train_says_at_once_what_it_does(tmp_path: Path) -> None:
    """Before any set-up, and where it is made already: what, how long, and where the results will be."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    make = ["make", "--no-print-directory", "PYTHON=false"]  # a set-up fails at its first command
    fresh = subprocess.run([*make, "train"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert fresh.returncode != 0
    for part in ("ResNet-50", "2 ranks under horovodrun", "set-up    into .venv", "187 s on 2 cores", "88 s", "runs/resnet50/"):
        assert part in fresh.stdout, part
    assert "Python's venv module is missing" in fresh.stdout.partition("runs/resnet50/")[2]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").write_text("1")
    made = subprocess.run([*make, "announce"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "set-up    is done" in made.stdout and "187 s" not in made.stdout
