"""Each guide runs from top to bottom, in one folder; helpers/page_tests.py says which page has
another test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launching import run_command
from tests.helpers.page_tests import DOCS, GUIDES, TESTS, parts_of
from tests.helpers.pages import ROOT, blocks, commands, prepare, run_page


@pytest.mark.parallel
@pytest.mark.parametrize(("name", "title"), parts_of(GUIDES))
def test_a_guide_runs_from_top_to_bottom(name: str, title: str, tmp_path: Path) -> None:
    """Its files are written and its commands run, in the page's order;
    each ends as the page says.
    """
    prepare(tmp_path)
    assert run_page(DOCS / f"{name}.md", tmp_path, title=title) > 0


def test_each_page_with_commands_is_run() -> None:
    """A page that no test runs would soon be wrong."""
    with_commands = {page.stem for page in DOCS.glob("*.md") if any(commands(page))}
    assert with_commands - {"index"} <= set(TESTS)
    named = {test for parts in TESTS.values() for test in parts.values()}
    assert [test for test in named if not (ROOT / "tests" / test).is_file()] == []


def test_what_is_not_run_says_why() -> None:
    """A block is left out for a reason of more than a word, and only shell commands are."""
    left_out = [block for page in DOCS.glob("*.md") for block in blocks(page) if not block.is_run]
    assert left_out
    for block in left_out:
        assert len(block.comment.split()) > 5 and block.commands, block


@pytest.mark.parallel
def test_one_batch_gives_one_result_on_any_number_of_ranks(tmp_path: Path) -> None:
    """What docs/optimizers.md says of its first two commands, to the last digits of the weights."""
    block = next(block for block in blocks(DOCS / "optimizers.md") if block.commands)
    for line in block.commands:
        done = run_command(f"{line} trainer.max_steps=20", tmp_path)
        assert done.code == 0, done.text
    one, two = (
        load_file(tmp_path / f"runs/{name}/checkpoints/last/weights.safetensors")
        for name in ("one", "two")
    )
    assert len(one) > 0
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
