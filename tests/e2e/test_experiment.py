"""`python -m trainkit experiment` trains both sides of each seed on the same samples, once."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.launching import Command
from tests.helpers.pages import ROOT, blocks


def test_two_scripts_are_compared_seed_by_seed(command: Command, tmp_path: Path) -> None:
    """The pairs share weights and samples; a second call runs only the seed that is new, and a
    budget of too few seconds names what is left out.
    """
    page = next(
        block for block in blocks(ROOT / "docs" / "tutorial_script.md") if block.file == "mine.py"
    )
    text = page.content.replace("lr=0.05", "lr=rate").replace(
        "width = parser",
        'parser.add_argument("--lr", type=float)\nrate = parser.parse_args().lr\nwidth = parser',
    )
    by_epoch = text.replace("loss)\n        return", "loss, on_epoch=True)\n        return")
    (tmp_path / "mine.py").write_text(by_epoch.replace("max_epochs=3", "max_epochs=1"))
    line = (
        "python -m trainkit experiment 'mine.py --lr 0.05' 'mine.py --lr 0.0005'"
        " metric=train/loss mode=min run_dir=runs/x --json seeds="
    )
    first = command(f"{line}1")
    assert first.code == 0, first.text
    assert "no difference shown" in first.out
    done = command(f"{line}2")
    assert done.code == 0, done.text
    assert done.err.count("seed 1, ") == 2 and "seed 0, " not in done.err
    facts = json.loads(done.out)
    assert facts["verdict"] in ("a better", "no difference shown")
    assert facts["paired"]["difference"] > 0
    assert facts["notes"][0] == (
        "Each seed: the same samples in the same order, bit for bit; the same first weights."
    )
    assert json.loads((tmp_path / "runs/x/reports/experiment.json").read_text()) == facts
    short = command(f"{line}4 budget=0.1s")
    assert json.loads(short.out)["left_out"] == [2, 3], short.text
    assert [row["seed"] for row in json.loads(short.out)["seeds"]] == [0, 1]


def test_sides_that_are_not_the_same_problem(command: Command, tmp_path: Path) -> None:
    """The key and both values are named, and nothing is trained."""
    done = command(
        "python -m trainkit experiment data.batch_size=32 data.batch_size=16 conf=mlp"
        " metric=val/loss mode=min"
    )
    assert done.code == 2, done.text
    assert "global batch is 32 of a (data.batch_size=32) and 16 of b" in done.err
    assert list(tmp_path.iterdir()) == []
