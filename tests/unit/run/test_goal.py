"""What runs are compared by: from a config, and from the note of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.extensions.reports.show.files import read_goal
from trainkit.run.goal import FOLDER, Goal, goal_of_config, write_goal

STOP = {"callbacks.stop.monitor": "val/loss"}
SAVE = {"callbacks.save.monitor": "val/acc", "callbacks.save.mode": "max"}


@pytest.mark.parametrize(
    ("settings", "goal"),
    [
        ({}, Goal()),
        ({"callbacks.save.monitor": None, "lr.monitor": "val/acc"}, Goal()),
        (STOP | SAVE, Goal("val/loss", "min")),
        (SAVE | STOP, Goal("val/acc", "max")),
        (STOP | SAVE | {"optimized_metric": "val/acc"}, Goal("val/acc", "max")),
        (STOP | {"optimized_metric": "train/loss"}, Goal("train/loss", None)),
        (STOP | {"callbacks.stop.mode": "nearest"}, Goal("val/loss", None)),
    ],
)
def test_a_config_asks_for_it(settings: dict[str, Any], goal: Goal) -> None:
    """optimized_metric, or what the first callback monitors; the mode is that of a callback which
    monitors it.
    """
    assert goal_of_config(settings) == goal


def test_a_sweep_leaves_it_in_its_folder(tmp_path: Path) -> None:
    """Whole; a damaged note is none."""
    goal = Goal("val/acc", "max", ("launcher=ray", "launcher.num_workers=2"))
    write_goal(tmp_path, goal)
    assert read_goal(tmp_path) == goal
    for damaged in ("[1]", "{", '{"metric": "a"}'):
        (tmp_path / FOLDER / "goal.json").write_text(damaged)
        assert read_goal(tmp_path) is None
    assert read_goal(tmp_path / "elsewhere") is None
