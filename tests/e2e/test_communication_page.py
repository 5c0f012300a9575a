"""Every command of docs/communication.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pages import part

PAGE = Path(__file__).parents[2] / "docs" / "communication.md"
SMALL = (
    " task.model.depth=1 task.model.width=32 task.model.heads=2 data.batch_size=2"
    " trainer.limit_val_batches=1"
)


def commands() -> list[str]:
    """Return the page's commands."""
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", part(PAGE, ""), flags=re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.mark.parallel
@pytest.mark.parametrize("number", range(5))
def test_the_pages_commands_run(number: int, command: Command) -> None:
    """A plan, a fit of each kind, and the proof that a killed one resumes exactly;
    each shows what it approximates.
    """
    assert len(commands()) == 5
    line = commands()[number]
    done = command(line.replace("max_steps=100", "max_steps=12") + SMALL, timeout_s=200)
    assert done.code == 0, f"{line}\n{done.text}"
    assert (
        "EQUAL" in done.text
        if "check-resume" in line
        else re.search(r"gradients +approximate: ", done.text)
    ), done.text
