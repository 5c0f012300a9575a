"""A package from outside of the repository is one more extension:
that of docs/how_it_works.md, built and installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.pages import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_it_works.md"


class Installed:
    """A folder of installed packages beside this environment's."""

    def __init__(self, site: Path, cwd: Path) -> None:
        self.site, self.cwd = site, cwd

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a trainkit command with the package installed."""
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(self.site), str(ROOT)))}
        return subprocess.run(
            [sys.executable, "-m", "trainkit", *arguments],
            cwd=self.cwd,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )


def install(source: Path, site: Path) -> None:
    """Build a wheel of the source and unpack it, entry points included, as pip does."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ]
    subprocess.run([*build, str(source / "dist"), str(source)], check=True, capture_output=True)
    wheels = [str(path) for path in (source / "dist").glob("*.whl")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            *wheels,
        ],
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The page's package, installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for block in blocks(PAGE):
        if block.file is not None:
            file = source / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.content)
    install(source, site)
    return Installed(site, tmp_path_factory.mktemp("folder"))


def typed() -> Sequence[tuple[list[str], list[str]]]:
    """Return the trainkit commands of the page's console, each with its output there."""
    text = PAGE.read_text().partition("```console\n")[2].partition("```")[0]
    _, *pieces = text.split("$ ")
    pairs = [(piece.splitlines()[0].split(), piece.splitlines()[1:]) for piece in pieces]
    return [
        (words[3:], output) for words, output in pairs if words[:3] == ["python", "-m", "trainkit"]
    ]


def test_the_pages_commands_do_what_the_page_says(installed: Installed) -> None:
    """Fits with the extension's callback, engine and launcher, its command, and the doctor,
    in the page's order.
    """
    *commands, doctor = typed()
    assert len(commands) == 4
    for arguments, output in commands:
        done = installed.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not output or done.stdout.splitlines() == output
    found = json.loads(installed.run(*doctor[0], "--json", "--no-allreduce").stdout)
    assert [each["value"] for each in found if each["area"] == "notes"] == ["there is one"]


def test_it_is_listed_and_helped(installed: Installed) -> None:
    """Among the commands, in the list of extensions with its package's name,
    and in an error about an engine.
    """
    assert "notes         print a run's notes" in installed.run("--help").stdout
    (own,) = [
        each
        for each in json.loads(installed.run("extensions", "--json").stdout)
        if each["name"] == "notes"
    ]
    assert own["source"] == "trainkit-notes" and own["engines"] == ["careful"]
    assert "notes" in installed.run("extensions").stdout
    wrong = installed.run("fit", "conf=mlp", "engine=carefull")
    assert wrong.returncode == 2 and "careful" in wrong.stderr


def test_without_the_package_its_names_are_unknown() -> None:
    """This environment has no such command."""
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "notes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "'notes' is not a command." in done.stderr
