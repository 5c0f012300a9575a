"""The README runs from top to bottom, as a newcomer would, and says what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pages import ROOT, blocks, prepare, run_page, shrunk

README, CONTRACT = ROOT / "README.md", ROOT / "docs" / "optimizers.md"
MADE = [line for block in blocks(README) for line in block.commands if line.startswith("make ")]


def test_ci_runs_what_the_readme_starts_with() -> None:
    """The README's make commands are those of .ci/run."""
    assert sorted(MADE) == ["make test", "make train"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f"\n{line}" in ci for line in MADE)


def test_it_is_short() -> None:
    """It is the first look; the rest is docs/."""
    lines = README.read_text().splitlines()
    assert len(lines) < 150 and max(map(len, lines)) <= 110


@pytest.mark.parallel
def test_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """Its Task, its config, its recipes: each command ends with 0, the long ones made small;
    set-up is left to CI.
    """
    prepare(tmp_path)
    page = tmp_path / "README.md"
    page.write_text(
        README.read_text().replace(
            "```sh\nmake train", "<!-- not run: .ci/run does -->\n```sh\nmake train"
        )
    )
    assert run_page(page, tmp_path) >= 9


@pytest.mark.parallel
def test_two_ranks_print_what_the_contracts_page_shows(command: Command, tmp_path: Path) -> None:
    """To the letter, but for the time and what is derived from it;
    the loss too, since the script is seeded.
    """
    (task,) = [block for block in blocks(README) if block.file == "mine.py"]
    texts = [block.text for block in blocks(CONTRACT) if block.language == "text"]
    (shown,) = [text for text in texts if text.startswith("engine")]
    (tmp_path / "mine.py").write_text(task.content)
    done = command("horovodrun -np 2 python mine.py")
    assert done.code == 0, done.text
    printed = [line.removeprefix("[0]<stdout>:") for line in done.out.splitlines()]

    def structure(lines: list[str]) -> list[str]:
        return [
            re.sub(r"[\d,.]+", "#", line) if line.startswith("epoch") else line for line in lines
        ]

    def losses(lines: list[str]) -> list[float]:
        return [
            float(found[1]) for line in lines if (found := re.search(r"val/loss ([\d.]+)", line))
        ]

    assert structure(printed) == structure(shown.splitlines())
    # other processors round otherwise
    assert losses(printed) == pytest.approx(losses(shown.splitlines()), rel=0.01)


def test_long_commands_are_made_small() -> None:
    """What is cut: batches, steps and images, never the command."""
    line = "horovodrun -np 2 python -m trainkit fit conf=resnet50"
    assert shrunk(line).startswith(line) and "max_steps=2" in shrunk(line)
    assert shrunk("python mine.py") == "python mine.py"
