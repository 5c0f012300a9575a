"""Each example of the page of errors ends with the error that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_command
from tests.helpers.pages import ROOT, blocks
from trainkit.cli.explained import explained, name_of

PAGE = ROOT / "trainkit" / "cli" / "explained" / "errors.md"
PARTS = {part.partition("\n")[0]: part for part in PAGE.read_text().split("\n## ")[1:]}
WITH_EXAMPLE = [name for name, part in PARTS.items() if "```sh" in part]


@pytest.mark.parallel
@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_an_example_ends_with_its_error(name: str, tmp_path: Path) -> None:
    """The message is that of the part, and a command's names the part."""
    part = tmp_path / "part.md"
    part.write_text(PARTS[name])
    for block in blocks(part):
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(exist_ok=True)
            (tmp_path / block.file).write_text(block.content)
        for line in block.commands:
            done = run_command(line, tmp_path)
            assert done.code != 0, line
            assert name_of(done.text) == name, done.text
            if "-m trainkit" in line:
                assert done.text.count(f"More: python -m trainkit explain {name}") == 1, done.text


def test_most_errors_have_an_example() -> None:
    """The page is read as it is meant to be."""
    assert len(WITH_EXAMPLE) >= 9 and set(WITH_EXAMPLE) <= set(explained())
