"""Each guide runs from top to bottom, in one folder; helpers/page_tests.py says which page has
another test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launching import run_command
from tests.helpers.page_tests import DOCS, GUIDES, parts_of
from tests.helpers.pages import blocks, prepare, run_page


@pytest.mark.parallel
@pytest.mark.parametrize(("name", "title"), parts_of(GUIDES))
def test_a_guide_runs_from_top_to_bottom(name: str, title: str, tmp_path: Path) -> None:
    """Its files are written and its commands run, in the page's order;
    each ends as the page says.
    """
    prepare(tmp_path)
    assert run_page(DOCS / f"{name}.md", tmp_path, title=title) > 0


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
