"""Every command of docs/large_models.md runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pages import part

PAGE = Path(__file__).parents[2] / "docs" / "large_models.md"
SMALL = (
    " task.model.depth=4 task.model.width=32 task.model.heads=2 data.batch_size=2"
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
def test_the_pages_commands_run(command: Command) -> None:
    """Fits, plans, and fits that one process validates and exports."""
    assert len(commands()) == 18
    for line in commands():
        small = SMALL if "conf=gpt" in line else ""
        done = command(line + small + " trainer.max_steps=2" * (" fit " in line), timeout_s=200)
        assert done.code == 0, f"{line}\n{done.text}"
